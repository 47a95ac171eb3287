"""Warns if file descriptors run out: the kernel then resets connections, and no other log says why."""

import logging
import resource
import time

_SPARE = 8
_TOLD_AGAIN_S = 60.0

_log = logging.getLogger(__name__)


class DescriptorWatch:
    """Looks at the descriptor of each new connection, and says when it is one of the last."""

    def __init__(self) -> None:
        self._told_until = 0.0

    def look(self, descriptor: int) -> None:
        """Check a new descriptor: the kernel assigns the lowest free number."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY or descriptor < limit - _SPARE:
            return
        now = time.monotonic()
        if now >= self._told_until:
            self._told_until = now + _TOLD_AGAIN_S
            _log.error(
                "of %d file descriptors hardly any are left, and without them connections are reset: raise the limit "
                "(ulimit -n), or lower max_connections",
                limit,
            )
