"""External agents: they use OpenAI's API, and their samples are recorded token by token."""
