"""Sokoban: boards, levels, a solver, a generator and the environment."""
