"""What an author's environment is checked for."""
