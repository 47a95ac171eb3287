"""Used by every room of the trainer: errors, numbers, seeds, files of a run. All enter, and it imports no other."""
