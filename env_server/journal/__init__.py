"""What was done in a session, and the proof that doing it again gives the same; sessions and rooms above enter."""
