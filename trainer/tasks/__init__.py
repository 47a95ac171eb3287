"""What to play next; from `records` up all enter."""
