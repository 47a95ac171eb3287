"""ROCK's sandbox server (rocklet), which has GEM's environments in it: the port."""

import sys

import uvicorn
from rock.rocklet.server import app

if __name__ == "__main__":
    import gem  # noqa: F401 - so that the first environment is not the one that waits for it

    uvicorn.run(app, port=int(sys.argv[1]), log_level="critical")
