"""What every room of the trainer uses: errors, numbers, seeds, files of a run. It imports no other room."""
