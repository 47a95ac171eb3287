"""The processes between a server and a program; entered by back-ends, which send an order and read frames.

    server (any threads) --> launcher (one thread, holds no secrets)
                               |-- monitor of a run: limits, streams, clean-up; outside of the sandbox
                                     |-- init: the sandbox's first process, inside
                                           |-- the program

The launcher is a fresh interpreter that forks a monitor for each run, so that no process with threads is ever forked
and nothing of the server's memory, environment or descriptors can be inherited.
"""
