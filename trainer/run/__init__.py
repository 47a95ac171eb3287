"""A run: its commands, and the parts that its settings ask for; the command line enters, and `rollgym.train`."""
