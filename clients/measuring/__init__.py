"""Instruments: counters of a server, the wait for a processor, intervals of rates, hard texts; all may enter."""
