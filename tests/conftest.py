"""What every test can count on."""

import os
import signal
import sys


def pytest_configure() -> None:
    """Let Ctrl-C be Ctrl-C: a shell starts what runs in its background with it ignored, and so would we start all."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # The programs that tests start would compile every module anew, hundreds of times.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def pytest_xdist_auto_num_workers() -> int:
    """Three workers on two cores: by their clocks, tests wait for servers and children 40 % of their time."""
    return (os.cpu_count() or 1) * 3 // 2 or 1
