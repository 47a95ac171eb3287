"""Records of a session's actions, with digests that prove a replay equal; sessions and rooms above enter."""
