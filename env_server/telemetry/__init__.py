"""What is counted, logged and traced, for every room above."""
