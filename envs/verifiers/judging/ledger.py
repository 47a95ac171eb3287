"""What judging has cost and found: kept for all processes in a directory, or in memory for one verifier."""

import contextlib
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from rollgym.envs.verifiers.judging.endpoint import JudgeError, JudgeTimeoutError
from rollgym.user_paths import expand_user

_WAIT_S = 30.0
_LOOK_AGAIN_S = 0.02
_MOST_KEPT = 4096


@dataclass(frozen=True, slots=True)
class JudgingBudget:
    """What judging may cost in all.

    Attributes:
        calls: Requests to the endpoint, repeated ones too; None for any number.
        tokens: Tokens, as the endpoint counts them; none is asked for once so many are spent.
    """

    calls: int | None = None
    tokens: int | None = None


class JudgingLedger(Protocol):
    """Scores that were found, and what was spent."""

    def find(self, key: str) -> float | None:
        """Return the score that was found for a key."""
        ...

    def keep(self, key: str, score: float) -> None:
        """Keep a score."""
        ...

    def spend_call(self) -> None:
        """Count a request before it is made.

        Raises:
            JudgeError: The budget is spent.
        """
        ...

    def spend_tokens(self, tokens: int) -> None:
        """Count tokens."""
        ...

    def slot(self, deadline: float) -> contextlib.AbstractContextManager[None]:
        """Wait for one of the places for requests under way, until a deadline by the monotonic clock."""
        ...

    def close(self) -> None:
        """Let it go."""
        ...


class MemoryLedger:
    """Remembers the latest scores of one verifier, and counts nothing."""

    def __init__(self) -> None:
        self._scores: OrderedDict[str, float] = OrderedDict()

    def find(self, key: str) -> float | None:
        """Return the score that was found for a key."""
        return self._scores.get(key)

    def keep(self, key: str, score: float) -> None:
        """Keep a score."""
        self._scores[key] = score
        if len(self._scores) > _MOST_KEPT:
            self._scores.popitem(last=False)

    def spend_call(self) -> None:
        """Nothing is counted."""

    def spend_tokens(self, tokens: int) -> None:
        """Nothing is counted."""

    def slot(self, deadline: float) -> contextlib.AbstractContextManager[None]:
        """Every request has a place."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """There is nothing to close."""


class SharedLedger:
    """A SQLite file and lock files in a directory, for all verifiers of all processes on one machine.

    Args:
        directory: Where; made if it is not there. A new directory begins a new budget.
        budget: What may be spent in all.
        places: How many requests may be under way at a time; None for any number.

    Raises:
        ValueError: It cannot be used.
    """

    def __init__(self, directory: str, budget: JudgingBudget, places: int | None) -> None:
        self._directory = Path(expand_user(directory))
        self._budget = budget
        self._places = places
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # One verifier is called by one thread at a time, though not always by the same.
            self._database = sqlite3.connect(
                self._directory / "judge.sqlite3",
                timeout=_WAIT_S,
                isolation_level=None,
                check_same_thread=False,
            )
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute("CREATE TABLE IF NOT EXISTS scores (key TEXT PRIMARY KEY, score REAL)")
            self._database.execute("CREATE TABLE IF NOT EXISTS spent (what TEXT PRIMARY KEY, amount INTEGER)")
            self._database.execute("INSERT OR IGNORE INTO spent VALUES ('calls', 0), ('tokens', 0)")
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"shared_dir cannot be used: {error}") from error

    def find(self, key: str) -> float | None:
        """Return the score that was found for a key."""
        row = self._execute("SELECT score FROM scores WHERE key = ?", key).fetchone()
        return None if row is None else float(row[0])

    def keep(self, key: str, score: float) -> None:
        """Keep a score."""
        self._execute("INSERT OR REPLACE INTO scores VALUES (?, ?)", key, score)

    def spend_call(self) -> None:
        """Count a request before it is made, in one statement: processes that ask at once do not both get the last.

        Raises:
            JudgeError: The budget is spent.
        """
        counted = self._execute(
            "UPDATE spent SET amount = amount + 1 WHERE what = 'calls' AND amount < ? "
            "AND (SELECT amount FROM spent WHERE what = 'tokens') < ?",
            _bound(self._budget.calls),
            _bound(self._budget.tokens),
        )
        if counted.rowcount != 1:
            raise JudgeError("the judge's budget is spent (max_calls, max_total_tokens)")

    def spend_tokens(self, tokens: int) -> None:
        """Count tokens."""
        self._execute("UPDATE spent SET amount = amount + ? WHERE what = 'tokens'", tokens)

    @contextlib.contextmanager
    def slot(self, deadline: float) -> Iterator[None]:
        """Wait for one of the places for requests under way. A process that dies gives its places back.

        Raises:
            JudgeTimeoutError: None became free before the deadline.
        """
        if self._places is None:
            yield
            return
        with contextlib.ExitStack() as stack:
            names = (self._directory / f"place-{number}" for number in range(self._places))
            files = [stack.enter_context(open(name, "ab")) for name in names]
            # A lock can be waited for, but nothing tells when any of several is free.
            while not any(map(_locked, files)):
                if time.monotonic() > deadline:
                    raise JudgeTimeoutError("too many requests to the judge are under way")
                time.sleep(_LOOK_AGAIN_S)
            yield

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        try:
            return self._database.execute(statement, values)
        except sqlite3.Error as error:
            raise JudgeError(f"the judge's shared_dir cannot be used: {error}") from error


def _bound(limit: int | None) -> int:
    return 2**62 if limit is None else limit


def _locked(file: IO[Any]) -> bool:
    # Unix only, and needed for this alone.
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
