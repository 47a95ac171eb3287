"""Rules about the form of a response: its structure, length, repetition and script."""
