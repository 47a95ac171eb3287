"""What each paper sets: the numbers of the presets, with where they are from."""
