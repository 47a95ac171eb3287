"""The list of servers, from a file that may change during a run."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from rollgym.trainer.config.servers_file import read_servers
from rollgym.trainer.core.errors import ConfigError


class FileRoster:
    """Reads the servers' addresses from a file; while it is unusable, the last valid list counts.

    Args:
        path: The file.
        say: Called when the file cannot be used, once for each reason, and when it can again.

    Raises:
        ConfigError: If it cannot be used at the start.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path.absolute()
        self._say = say
        self._named = read_servers(self._path)
        self._trouble = ""

    async def names(self) -> Sequence[str]:
        """Return the addresses of the servers that there are to be."""
        try:
            named = await asyncio.to_thread(read_servers, self._path)
        except ConfigError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._say(f"{error}; the {len(self._named)} servers that it named last stay")
            return self._named
        if self._trouble:
            self._trouble = ""
            self._say(f"inference.urls_file: {self._path} can be read again")
        self._named = named
        return named
