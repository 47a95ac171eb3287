"""Reinforcement learning as pure functions: tensors in, tensors out."""
