"""Play episodes: agents, prompts, scheduling."""
