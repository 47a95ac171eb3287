"""Progress of the response to one call, for stall detection: a live server may start a response that never ends."""

from collections.abc import Callable


class Arrival:
    """Tracks the progress of one answer, to detect that it has stalled.

    Args:
        held: Returns whether the server is paused: a paused server does not count as stalled.
        clock: Returns the time, in seconds.
    """

    def __init__(self, held: Callable[[], bool], clock: Callable[[], float]) -> None:
        self._held = held
        self._clock = clock
        self._since: float | None = None

    def begin(self) -> None:
        """Start the stall clock at the first byte of the answer or of its body; later bytes do not reset it."""
        if self._since is None:
            self._since = self._clock()

    def news(self) -> None:
        """Something new has come, such as a token."""
        self._since = self._clock()

    def wait(self) -> None:
        """What comes next may take its time: the first token of a stream waits for those of others."""
        self._since = None

    def stalled(self, after_s: float, *, steered: bool) -> bool:
        """Return whether nothing new has come for so long.

        Args:
            after_s: How long that is.
            steered: Whether a control call (pause, load and the like) is in flight: it may block all other work.
        """
        if self._since is None:
            return False
        if steered or self._held():
            self.news()
        return self._clock() - self._since >= after_s
