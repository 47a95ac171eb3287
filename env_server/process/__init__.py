"""The processes of a server: one that serves, one that keeps several alive; programs and the command line enter."""
