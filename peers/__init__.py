"""What runs implementations of others and records what they do. Nothing of it is in the package."""
