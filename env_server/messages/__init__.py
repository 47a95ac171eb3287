"""Reading requests and encoding answers, with no transport and no state."""
