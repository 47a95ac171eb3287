"""What every test can count on."""

import os
import signal


def pytest_configure() -> None:
    """Let Ctrl-C be Ctrl-C: a shell starts what runs in its background with it ignored, and so would we start all."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """Three workers on two cores: by their clocks, tests wait for servers and children 40 % of their time."""
    return (os.cpu_count() or 1) * 3 // 2 or 1
