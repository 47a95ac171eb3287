"""The sandbox of a server: opened at its start, and how much of it each token has."""

import asyncio
from collections import Counter
from typing import cast

from clients.protocol.errors import ProblemError
from env_server.access.auth import Caller
from env_server.common.configuration import ConfigurationError
from env_server.common.settings import Settings
from env_server.messages.validation import invalid
from sandbox.core.base import SandboxUnavailableError
from sandbox.core.cancelling import CancellableSandbox
from sandbox.remote.run_code import RunCodeRequest
from sandbox.selection import open_sandbox

_RETRY_AFTER_S = 1


class ServedSandbox:
    """The sandbox, and what callers may ask of it.

    Args:
        settings: Which one it is, and the most that a program may use.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._opened: CancellableSandbox | None = None

    async def start(self) -> None:
        """Open it; it is looked at before anything runs in it.

        Raises:
            ConfigurationError: If it does not work here.
        """
        try:
            # The one back-end whose runs cannot be cancelled, a server that has it does not offer again.
            self._opened = cast(
                CancellableSandbox, await asyncio.to_thread(open_sandbox, self._settings.sandbox)
            )
        except SandboxUnavailableError as error:
            raise ConfigurationError(f"sandbox: {error}") from error

    async def close(self) -> None:
        """End it."""
        if self._opened is not None:
            await asyncio.to_thread(self._opened.close)

    @property
    def sandbox(self) -> CancellableSandbox:
        """The sandbox itself."""
        assert self._opened is not None, "the server starts its sandbox before it answers"
        return self._opened

    def check(self, request: RunCodeRequest, longest_s: float, setting: str) -> None:
        """Refuse a request for more than callers may have.

        Args:
            request: What is asked for.
            longest_s: For how long the program may run.
            setting: That says so.

        Raises:
            ProblemError: `invalid_request`.
        """
        settings = self._settings
        if request.run_timeout > longest_s:
            raise invalid("run_timeout", f"at most {longest_s:g} (the server's {setting})")
        if request.compile_timeout > settings.max_run_s:
            raise invalid("compile_timeout", f"at most {settings.max_run_s:g} (the server's max_run_s)")
        asked = {
            "memory_limit_MB": request.memory_limit_MB,
            "limits.compile_memory_mb": request.limits.compile_memory_mb or 0,
        }
        for name, mib in asked.items():
            if mib > settings.max_run_memory_mb:
                raise invalid(name, f"at most {settings.max_run_memory_mb} (the server's max_run_memory_mb)")


class Places:
    """How many there may be of something, in all and of one token.

    Args:
        limit: In all.
        per_token: Of a token whose entry says nothing.
        name: The setting of the limit.
        what: What is counted, for people.
    """

    def __init__(self, limit: int, per_token: int, name: str, what: str) -> None:
        self._limit = limit
        self._per_token = per_token
        self._name = name
        self._what = what
        self._taken: Counter[str] = Counter()

    def take(self, caller: Caller) -> None:
        """Count one more.

        Raises:
            ProblemError: `at_capacity`.
        """
        of_token = caller.quota.max_runs or self._per_token
        if self._taken[caller.name] >= of_token:
            raise ProblemError(
                "at_capacity",
                f"this token has its {of_token} {self._what}; ask again when one has ended",
                retry_after=_RETRY_AFTER_S,
                limit=f"{self._name}_per_token",
            )
        if self._taken.total() >= self._limit:
            raise ProblemError(
                "at_capacity",
                f"this server has its {self._limit} {self._what}; ask again later, or ask another server",
                retry_after=_RETRY_AFTER_S,
                limit=self._name,
            )
        self._taken[caller.name] += 1

    def leave(self, name: str) -> None:
        """Count one less of a token."""
        self._taken[name] -= 1
        if not self._taken[name]:
            del self._taken[name]
