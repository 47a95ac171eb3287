"""What every test can count on."""

import signal


def pytest_configure() -> None:
    """Let Ctrl-C be Ctrl-C: a shell starts what runs in its background with it ignored, and so would we start all."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
