"""Where environment objects live: in this process, in a thread, in a child process; from `catalog` up all enter."""
