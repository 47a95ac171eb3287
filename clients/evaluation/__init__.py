"""Evaluation of a model behind an OpenAI-compatible API, without a trainer; the command and integrations enter."""
