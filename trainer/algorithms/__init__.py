"""Reinforcement learning as pure functions: tensors in, tensors out; from `config` up all enter."""
