"""Reading requests and encoding answers, with no transport and no state; from `gateway` and `peers` up all enter."""
