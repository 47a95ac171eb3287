"""`python -m rollgym.env_server` is `roll-serve`."""

import sys

from rollgym.env_server.cli import main

if __name__ == "__main__":
    sys.exit(main())
