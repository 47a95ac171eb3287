"""The settings of each paper: the numbers of the presets, with their sources."""
