"""The first process of a sandbox that another program has made: started inside, with the channel as a descriptor."""

import socket
import sys

from sandbox.supervisor.init import run_init
from sandbox.supervisor.jails import InnerJail


def main() -> None:
    """Serve the monitor."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    run_init(channel, InnerJail())
