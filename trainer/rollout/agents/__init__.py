"""Agents that were not written for us: they speak OpenAI's API, and what they sample is recorded token by token."""
