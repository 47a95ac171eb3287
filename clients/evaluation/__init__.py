"""Evaluation of a model behind an OpenAI-compatible API on an environment of a server, without a trainer."""
