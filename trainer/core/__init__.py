"""What every room of the trainer uses: errors, numbers, seeds, files of a run. All enter, and it imports no other."""
