"""Parts of a program beside its client: a loop on a thread, a server of its own, terminal, signals; all may enter."""
