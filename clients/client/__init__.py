"""The user's side of a fleet: client, sessions, and Gymnasium environments and verifiers over them; all may enter."""
