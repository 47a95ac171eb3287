"""Processes of a server: one that serves, and one that keeps several alive. Nothing but the command line enters."""
