"""What was done in a session, in memory and on disk, and the proof that doing it again gives the same."""
