"""`python -m env_server` is `roll-serve`."""

import sys

from env_server.cli import main

if __name__ == "__main__":
    sys.exit(main())
