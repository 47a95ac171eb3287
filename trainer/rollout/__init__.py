"""Play episodes: agents, prompts, scheduling; from `learn` up all enter."""
