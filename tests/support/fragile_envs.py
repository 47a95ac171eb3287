"""Environments that hang, crash and answer nonsense, each on command, and the way in which they tell of it."""

import asyncio
import contextlib
import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np

from rollgym.clients.protocol.spaces import UnicodeText
from rollgym.clients.protocol.values import encode_value


class Beacon:
    """A named pipe that environments write to, wherever they run, and that a test waits on."""

    def __init__(self, directory: Path, name: str = "beacon") -> None:
        self.path = directory / name
        os.mkfifo(self.path)
        # Open for both, so that no writer ever waits or fails, however many of them come and go.
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        self._text = ""

    async def wait(self) -> int:
        """Wait until an environment has told something: the id of the process that it runs in."""
        async with asyncio.timeout(30):
            while "\n" not in self._text:
                await _readable(self._descriptor)
                self._text += os.read(self._descriptor, 4096).decode()
        line, _, self._text = self._text.partition("\n")
        return int(line)

    def pending(self) -> list[int]:
        """All that was told and not waited for."""
        with contextlib.suppress(BlockingIOError):
            self._text += os.read(self._descriptor, 65536).decode()
        lines, self._text = self._text.split("\n")[:-1], ""
        return [int(line) for line in lines]

    def close(self) -> None:
        os.close(self._descriptor)


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


async def kill(pid: int) -> None:
    """End a process as the kernel would when memory runs out, and wait until it is no more."""
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        await _ended(descriptor)
    finally:
        os.close(descriptor)


async def ended(pid: int) -> None:
    """Wait for the end of a process that is none of ours."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        await _ended(descriptor)
    finally:
        os.close(descriptor)


async def _ended(descriptor: int) -> None:
    async with asyncio.timeout(30):
        await _readable(descriptor)


def tell(path: str) -> None:
    """Tell the test that waits on a beacon which process this is."""
    with open(path, "w") as beacon:
        beacon.write(f"{os.getpid()}\n")


class Unprintable(Exception):  # noqa: N818 - the name says what it is
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("cannot be written")


RAISED: Mapping[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (
        *(RuntimeError, RecursionError, MemoryError, SystemExit, KeyboardInterrupt, GeneratorExit),
        *(asyncio.CancelledError, TimeoutError, ConnectionError, StopIteration, Unprintable),
    )
}


class Unreadable(Mapping[str, int]):
    """A mapping that raises when it is read."""

    def __getitem__(self, key: str) -> int:
        raise RuntimeError("not to be had")

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


class NoFloat(float):
    def __float__(self) -> float:
        raise RuntimeError("no number after all")


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def circular() -> dict[str, Any]:
    info: dict[str, Any] = {}
    info["itself"] = info
    return info


INFOS: Mapping[str, Any] = {
    "object": {"it": object()},
    "function": {"it": len},
    "unpicklable": {"it": Unpicklable()},
    "circular": circular(),
    "deep": {"it": nested(300)},
    "deeper": {"it": nested(5000)},
    "surrogate": {"it": "\ud800"},
    "surrogate-key": {"\ud800": 1},
    "huge": {"it": 2**64},
    "key": {(1, 2): 3},
    "lock": {"it": threading.Lock()},
    "unreadable": Unreadable(),
    "unreadable-part": {"it": Unreadable()},
    "unreadable-number": {"it": NoFloat(1)},
    "none": None,
    "list": [1],
}
"""Infos that have no form on the wire."""

OUTCOMES: Mapping[str, Any] = {
    "nothing": None,
    "four": ("", 0.0, False, {}),
    "number": (5, 0.0, False, False, {}),
    "no-observation": (None, 0.0, False, False, {}),
    "no-unicode": ("\ud800", 0.0, False, False, {}),
    "no-reward": ("", None, False, False, {}),
    "no-number": ("", math.nan, False, False, {}),
    "infinite": ("", np.float64("-inf"), False, False, {}),
    "too-large": ("", 10**400, False, False, {}),
    "two-rewards": ("", np.zeros(2), False, False, {}),
    "unreadable": ("", NoFloat(1), False, False, {}),
    "ends-unreadable": ("", 0.0, True, False, Unreadable()),
    "two-flags": ("", 0.0, np.zeros(2), False, {}),
}
"""What a step must not answer."""


class Frozen(Mapping[str, int]):
    """A mapping that can be in a set, as those of several packages can."""

    def __init__(self, **items: int) -> None:
        self._items = items

    def __getitem__(self, key: str) -> int:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))


class OwnSpace(gymnasium.Space):
    """A space that Gymnasium does not know."""


SPACES: dict[str, gymnasium.Space] = {
    "of its own": OwnSpace(),
    "too large": gymnasium.spaces.Text(10**9),
    "of no Unicode": gymnasium.spaces.Text(3, charset="\ud800"),
}


class Fragile(gymnasium.Env):
    """Every observation depends on the seed, the options and all actions; some actions bring trouble."""

    metadata: ClassVar[dict[str, Any]] = {
        "render_modes": ["ansi"],
        "deterministic": True,
        "forkable": True,
        "version": "1",
    }
    kwargs_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"length": {"type": "integer"}, "hang": {"type": "string"}, "any": {}},
        "additionalProperties": False,
    }

    def __init__(
        self, length: int = 50, hang: str = "", any: Any = None, render_mode: str | None = None
    ) -> None:
        self.length = length
        self.render_mode = render_mode
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()
        if isinstance(any, dict) and "space" in any:
            del self.observation_space
            if any["space"] in SPACES:
                self.observation_space = SPACES[any["space"]]
        self._steps = 0
        self._sum = 0
        if hang:
            self._hang(hang)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        options = options or {}
        if "hang" in options:
            self._hang(options["hang"])
        if "hold" in options:
            self._hold(options["hold"])
        self._steps = 0
        self._sum = int(self.np_random.integers(1000)) + int(options.get("start", 0))
        return f"begin {self._sum}", {"sum": self._sum}

    def step(self, action: str) -> tuple[Any, float, bool, bool, Any]:
        verb, _, rest = action.partition(" ")
        if verb == "answer":
            return OUTCOMES[rest]
        info = getattr(self, f"_{verb}", _nothing)(rest)
        self._steps += 1
        self._sum += int(self.np_random.integers(1000)) + len(action)
        observation = f"{self._steps} {self._sum} {action}"
        if info is _NOTHING:
            info = {"sum": self._sum, "dice": float(self.np_random.random())}
        return observation, self._sum / 7, self._steps >= self.length, False, info

    def render(self) -> str:
        return f"<{self._sum}>"

    # -- what actions bring --------------------------------------------------------------------------------------

    def _tell(self, path: str) -> Any:
        tell(path)
        return _NOTHING

    def _hang(self, path: str) -> Any:
        tell(path)
        threading.Event().wait()

    def _hold(self, paths: str) -> Any:
        """Wait for a file."""
        beacon, flag = paths.split()
        tell(beacon)
        while not os.path.exists(flag):
            time.sleep(0.005)
        return _NOTHING

    def _trap(self, paths: str) -> Any:
        """Let it pass the first time, and never again."""
        beacon, flag = paths.split()
        tell(beacon)
        if os.path.exists(flag):
            os._exit(3)
        Path(flag).touch()
        return _NOTHING

    def _exit(self, path: str) -> Any:
        tell(path)
        os._exit(3)

    def _signal(self, path: str) -> Any:
        tell(path)
        os.kill(os.getpid(), signal.SIGSEGV)

    def _null(self, path: str) -> Any:
        tell(path)
        ctypes.string_at(0)

    def _closes(self, path: str) -> Any:
        """Close every file of the process, as careless daemons do."""
        tell(path)
        os.closerange(3, 1024)
        return _NOTHING

    def _leave(self, path: str) -> Any:
        """Leave a process behind that holds all that was open, and crash."""
        child = os.fork()
        if not child:
            tell(path)
            threading.Event().wait()
        os.waitpid(child, os.WNOHANG)
        os.kill(os.getpid(), signal.SIGSEGV)

    def _fork(self, rest: str) -> Any:
        """Come back from the step twice, as whoever forgets to end what was forked does."""
        os.fork()
        return _NOTHING

    def _frozen(self, rest: str) -> Any:
        return {"seen": {Frozen(x=1)}}

    def _raise(self, name: str) -> Any:
        raise RAISED[name]("see /home/someone/secret.txt for \udcff")

    def _info(self, name: str) -> Any:
        return INFOS[name]


_NOTHING = object()


def _nothing(rest: str) -> Any:
    return _NOTHING


class Random(Fragile):
    """Does not promise to be deterministic."""

    metadata: ClassVar[dict[str, Any]] = Fragile.metadata | {"deterministic": False, "forkable": False}


class Pinned(Fragile):
    """Needs a thread of its own."""

    metadata: ClassVar[dict[str, Any]] = Fragile.metadata | {"pinned_thread": True}


class Newer(Fragile):
    """The next version of the same."""

    metadata: ClassVar[dict[str, Any]] = Fragile.metadata | {"version": "2"}


class SlowStart(Fragile):
    """Is made when the operator says so."""

    operator_kwargs: ClassVar[frozenset[str]] = frozenset({"hold"})

    def __init__(self, hold: str) -> None:
        super().__init__()
        self._hold(hold)


class Drifting(Fragile):
    """Says that it is deterministic, and is not: what it does depends on the process that it is in."""

    def step(self, action: str) -> tuple[Any, float, bool, bool, Any]:
        observation, reward, *others = super().step(action)
        return (f"{observation} in {os.getpid()}", reward, *others)  # type: ignore[return-value]


class Loud(Fragile):
    """Prints."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        print("this is loud", flush=True)
        return super().reset(seed=seed, options=options)


class Scores(Fragile):
    """Stateless; some responses bring trouble, too."""

    metadata: ClassVar[dict[str, Any]] = Fragile.metadata | {"kind": "stateless"}

    def score(self, response: str, task: Mapping[str, Any]) -> dict[str, Any]:
        verb, _, rest = response.partition(" ")
        getattr(self, f"_{verb}", _nothing)(rest)
        return {"score": float(np.float32(1.0)), "outcome": "correct", "detail": task["answer"]}


def undisturbed(actions: list[str], *, seed: int = 1, options: Any = None, **kwargs: Any) -> list[Any]:
    """What a session gives where nothing happens to it: the replies to its reset and its steps."""
    env = Fragile(**kwargs)
    observation, info = env.reset(seed=seed, options=options)
    replies: list[dict[str, Any]] = [
        {"observation": observation, "info": info, "episode": 0, "step": 0, "seed": seed}
    ]
    for number, action in enumerate(actions):
        observation, reward, terminated, truncated, info = env.step(action)
        replies.append(
            {
                "observation": observation,
                "reward": reward,
                "terminated": terminated,
                "truncated": truncated,
                "info": encode_value(None, info, binary=False),
                "episode": 0,
                "step": number + 1,
            }
        )
    return replies
