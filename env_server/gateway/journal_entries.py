"""The entries that gateways write to and read from their shared journal, as plain data.

Each is sealed by a checksum over its content and its place: its session, episode and index. An entry that is damaged,
or is at another entry's place, is not read.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.common.event_loop import in_slices
from rollgym.env_server.sessions.journal import EndReason

Arguments = tuple[Any, ...]
"""The arguments of the journal's script for one session."""

LEASE_S = 6.0
"""A gateway that moves a session and dies keeps the others waiting for no longer than this."""

ENDED = "ended:"
"""The result of a write to a session that has ended begins with it; the reason follows."""

_RETRY_AFTER_S = 1
_AWAY = "the journal that the gateways share cannot be used at present"
_ADVICE = "whether the step was taken is not known: name its episode and step, and ask again"
_pack = msgpack.Packer(use_bin_type=True).pack
# Nothing in MessagePack begins with it: what begins otherwise was written by a release that had no checksums.
_SEALED = b"\xc1"
_SEAL_BYTES = 5


def not_known(trouble: Exception | str) -> ProblemError:
    """The problem that a step may have been taken, which only one that names its place can find out."""
    detail = str(trouble)
    return ProblemError("upstream_error", detail if detail.endswith(_ADVICE) else f"{detail}; {_ADVICE}")


class JournalAway(Exception):  # noqa: N818 - the name says what happened
    """The journal does not answer, or cannot be written: nothing may be said to a client for now."""

    def problem(self) -> ProblemError:
        """The problem for the client, which retries; the cause and the journal's address go to the log only."""
        return ProblemError("draining", _AWAY, retry_after=_RETRY_AFTER_S)

    def not_known(self) -> ProblemError:
        """The same of a step that may have been taken, and named no place."""
        return not_known(_AWAY)


class Unreadable(Exception):  # noqa: N818 - the name says what happened
    """The journal's data of a session is damaged."""


class DamagedEntryError(ValueError):
    """An entry is not what was written at its place."""


def _sealed(content: bytes, *place: object) -> bytes:
    return b"".join((_SEALED, _checksum(content, place), content))


def _unsealed(entry: bytes, *place: object) -> bytes:
    if entry[:1] != _SEALED:
        return entry
    content = entry[_SEAL_BYTES:]
    if entry[1:_SEAL_BYTES] != _checksum(content, place):
        raise DamagedEntryError("its checksum is another one")
    return content


def _checksum(content: bytes, place: tuple[object, ...]) -> bytes:
    return zlib.crc32(content, zlib.crc32(repr(place).encode())).to_bytes(4, "big")


class EpisodeStart(NamedTuple):
    """How an episode began.

    Attributes:
        seed: Its seed.
        options: Options of its reset.
        reset_digest: The digest of the reset's return value.
        reseeds: Pairs (steps, seed): after so many steps, the generator got the new seed.
    """

    seed: int
    options: dict[str, Any] | None
    reset_digest: str
    reseeds: list[tuple[int, int]]

    def pack(self, session_id: str, episode: int) -> bytes:
        """As the journal has it."""
        return _sealed(_pack(tuple(self)), session_id, episode)

    @classmethod
    def read(cls, entry: bytes | None, session_id: str, episode: int) -> "EpisodeStart | None":
        """Unpack a head; None before the first episode.

        Raises:
            DamagedEntryError: It is not that episode's.
        """
        if not entry:
            if episode >= 0:
                raise DamagedEntryError("it does not say how the episode began")
            return None
        content = _unsealed(entry, session_id, episode)
        seed, options, reset_digest, reseeds = msgpack.unpackb(content, strict_map_key=False)
        return cls(seed, options, reset_digest, [(steps, seed) for steps, seed in reseeds])


class Step(NamedTuple):
    """One step of an episode.

    Attributes:
        action: The action in JSON's encoding.
        digest: The digest of its return value.
    """

    action: Any
    digest: str

    def pack(self, session_id: str, episode: int, index: int) -> bytes:
        """As the journal has it."""
        return _sealed(_pack((self.action, bytes.fromhex(self.digest))), session_id, episode, index)

    @classmethod
    def read(cls, entry: bytes, session_id: str, episode: int, index: int) -> "Step":
        """Unpack a step that `pack` has packed.

        Raises:
            DamagedEntryError: It is not the step at that place.
        """
        content = _unsealed(entry, session_id, episode, index)
        action, digest = msgpack.unpackb(content, strict_map_key=False)
        return cls(action, digest.hex())


class About(NamedTuple):
    """The constant facts of a session.

    Attributes:
        env_id: Its environment.
        env_version: The version of that.
        kwargs: The client's kwargs.
        idle_timeout_s: When it is evicted.
        spaces: Its action space and its observation space, if its kwargs change those.
    """

    env_id: str
    env_version: str
    kwargs: dict[str, Any]
    idle_timeout_s: float
    spaces: tuple[dict[str, Any], dict[str, Any]] | None

    def pack(self, session_id: str) -> bytes:
        """As the journal has it."""
        return _sealed(_pack(tuple(self)), session_id)

    @classmethod
    def read(cls, entry: bytes, session_id: str) -> "About":
        """Unpack the facts that `pack` has packed.

        Raises:
            DamagedEntryError: They are not that session's.
        """
        content = _unsealed(entry, session_id)
        env_id, env_version, kwargs, idle_timeout_s, spaces = msgpack.unpackb(content, strict_map_key=False)
        return cls(
            env_id, env_version, kwargs, idle_timeout_s, None if spaces is None else (spaces[0], spaces[1])
        )


@dataclass(frozen=True, slots=True)
class SharedSession:
    """A session as the journal stores it.

    Attributes:
        about: The constant facts of the session.
        generation: How often it was moved.
        node: The key of the node that holds it.
        upstream_id: Its id there.
        episode: Its present episode; -1 before the first one.
        steps: The number of steps in that episode.
        head: How that episode began.
        over: Whether its last step terminated, and whether it truncated it.
        ended: Why the session has ended, if it has.
        moving_s: How many seconds another gateway still has to move it; None if none moves it.
        answered: The episode and step that a gateway has answered, if the journal had less when that reported it; else
            (-1, 0).
    """

    about: About
    generation: int
    node: str
    upstream_id: str
    episode: int
    steps: int
    head: EpisodeStart | None
    over: tuple[bool, bool]
    ended: EndReason | None
    moving_s: float | None
    answered: tuple[int, int] = (-1, 0)

    @property
    def place(self) -> tuple[int, int]:
        """Its present episode, and the number of steps in it."""
        return self.episode, self.steps


class Claim(NamedTuple):
    """The right to move a session.

    Attributes:
        generation: The number of the move.
        episode: Its present episode; -1 before the first one.
        head: How that began.
        steps: The steps that it has.
    """

    generation: int
    episode: int
    head: EpisodeStart | None
    steps: list[Step]


class Opened(NamedTuple):
    """A new session.

    Attributes:
        session_id: Its id.
        about: The constant facts of the session.
        node: The key of its node.
        upstream_id: Its id there.
        episode: Its episode.
        head: How that began.
        over: Whether its last step terminated, and whether it truncated it.
        actions: Those of its steps, in JSON's encoding.
        digests: One for each.
    """

    session_id: str
    about: About
    node: str
    upstream_id: str
    episode: int
    head: EpisodeStart | None
    over: tuple[bool, bool]
    actions: Sequence[Any]
    digests: Sequence[str]


class Write(NamedTuple):
    """An event of a session that a gateway wants to answer to a client once the journal has acknowledged it.

    Attributes:
        session_id: The session.
        arguments: The arguments of the script.
        done: Called with `ok`, or with why it was not written: `missing`, `ended:REASON`, `fenced` and `moving` (it has
            moved to another node, or is about to), `gap` (earlier steps are unknown), `behind` (the node has less than
            was answered, or something else), `taken` (the step at this place is another one with the same action),
            `unsure` (whose it is, is not known any more), `away: REASON`.
    """

    session_id: str
    arguments: Arguments
    done: Callable[[str], None]


def check(generation: int) -> Arguments:
    """The entry that checks that the session still lives at the node that was asked."""
    return "check", generation


def begun(session_id: str, generation: int, episode: int, head: EpisodeStart) -> Arguments:
    """The entry that an episode began."""
    return "begin", generation, episode, head.pack(session_id, episode)


def stepped(
    session_id: str,
    generation: int,
    episode: int,
    index: int,
    step: Step,
    over: tuple[bool, bool],
    claim: str = "",
) -> Arguments:
    """The entry that a step was taken; see `InFlight.claim`."""
    return "step", generation, episode, index, step.pack(session_id, episode, index), flags(over), claim


def stepped_on(
    session_id: str,
    generation: int,
    episode: int,
    index: int,
    step: Step,
    following: EpisodeStart,
    claim: str = "",
) -> Arguments:
    """The entry that a step was taken which began the next episode in the same call; see `InFlight.claim`."""
    packed = step.pack(session_id, episode, index)
    return "last", generation, episode, index, packed, following.pack(session_id, episode + 1), claim


def whole(
    session_id: str,
    generation: int,
    episode: int,
    head: EpisodeStart,
    over: tuple[bool, bool],
    packed: Sequence[bytes],
) -> Arguments:
    """All of an episode, as its node has it; its steps are packed."""
    return "episode", generation, episode, flags(over), head.pack(session_id, episode), len(packed), *packed


async def packed_steps(
    session_id: str, episode: int, actions: Sequence[Any], digests: Sequence[str]
) -> list[bytes]:
    """Steps as the journal has them, packed in slices of the event loop's time.

    Args:
        session_id: Their session.
        episode: Their episode.
        actions: Their actions in JSON's encoding.
        digests: One for each.
    """
    return await in_slices(
        lambda at: Step(actions[at], digests[at]).pack(session_id, episode, at), range(len(actions))
    )


async def read_steps(session_id: str, episode: int, packed: Sequence[bytes]) -> list[Step]:
    """Steps that were packed, read in slices of the event loop's time.

    Raises:
        DamagedEntryError: One of them is not the step at its place.
    """
    return await in_slices(lambda at: Step.read(packed[at], session_id, episode, at), range(len(packed)))


def place_after(arguments: Arguments) -> tuple[int, int]:
    """The episode and the step that a session has reached with an entry; (-1, 0) if the entry has none."""
    kind, _, *rest = arguments
    if kind == "step":
        return rest[0], rest[1] + 1
    if kind == "last":
        return rest[0] + 1, 0
    return (rest[0], 0) if kind == "begin" else (-1, 0)


def flags(over: tuple[bool, bool]) -> int:
    """How an episode was ended by its last step, as a number."""
    return over[0] + 2 * over[1]
