"""The journal of a session: all that is needed to rebuild its episode, and the proof that it is the same one.

An environment is rebuilt by replay.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import msgpack
import orjson
from gymnasium import Space

from rollgym.clients.protocol.episode import PortableEpisode, step_digest
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.values import EncodeError, decode_value, encode_value
from rollgym.env_server.catalog.actions import action_reader
from rollgym.env_server.common.event_loop import Slices
from rollgym.env_server.workers.base import EnvironmentRaised, EnvSource, StepOutcome, Worker

DIGEST_BYTES = 8
MANY_STEPS = 20_000
"""The number of steps that take a few milliseconds to parse."""

EndReason = Literal["evicted", "closed", "lost", "replay_diverged"]
"""Why a session has ended."""
END_REASONS: tuple[EndReason, ...] = get_args(EndReason)

# Digests are computed on demand, which for most episodes is never. Until then the observations are kept: only a few,
# and only small immutable values; all texts together take no more memory than a session.
_MAX_PENDING = 32
_MAX_PENDING_TEXT = 512
_MAX_PENDING_TEXTS = 2048


# The bytes of a step in a portable episode beside its action: a digest in quotation marks, and two commas.
_STEP_BYTES = 2 * DIGEST_BYTES + 4
_RESEED_BYTES = 40
_INT_BYTES = 24
# JSON writes a control character with six signs, MessagePack a number of three signs with nine bytes.
_LONGEST_SIGN = 6
_LONGEST_NUMBER = 3


def _size(value: Any) -> int:
    """How many bytes a value takes in a portable episode, in the encoding that takes more."""
    size = len(orjson.dumps(value))
    # No text and no integer takes more in MessagePack.
    return size if type(value) in (str, int) else max(size, len(msgpack.packb(value)))


def _most(value: Any) -> int:
    """An upper bound of the size, which is cheap to compute."""
    if type(value) is str:
        return _LONGEST_SIGN * len(value) + 2
    return _INT_BYTES if type(value) is int else _LONGEST_NUMBER * len(orjson.dumps(value))


async def journal_of(episode: PortableEpisode) -> "Journal":
    """A journal that continues a portable episode; a long one is read in a thread.

    Raises:
        ValueError: A digest is not one.
    """
    if len(episode.actions) < MANY_STEPS:
        return Journal.from_portable(episode)
    return await asyncio.to_thread(Journal.from_portable, episode)


def unpacked(digests: bytes) -> list[str]:
    """Digests that were packed end to end, each by itself."""
    return digests.hex(" ", DIGEST_BYTES).split()


class EndedStep(NamedTuple):
    """The step that ended an episode and began the next one in the same call, as it was answered."""

    episode: int
    step: int
    action: Any
    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: Any


class Journal:
    """Seed, options and actions of a session's present episode, with a digest of each step's return value.

    Observations, actions and infos are given in JSON's encoding.

    Args:
        env_id: The environment's id.
        env_version: Its version.
        kwargs: The client's kwargs.

    Attributes:
        seed: Seed of the episode; None before the first one.
        options: Options of its reset.
        actions: The actions so far.
        reseeds: Pairs (steps, seed): after so many steps, the generator got the new seed.
        ended: Whether the last step terminated, and whether it truncated the episode.
        before: The step that began this episode, if one did; it is the last one answered until another is taken.
        request_id: The id of the request that began this episode, if it had one.
        most: An upper bound of `size`, known without measuring.
    """

    __slots__ = (
        "_digests",
        "_measured",
        "_measured_size",
        "_pending",
        "_pending_text",
        "_reset",
        "actions",
        "before",
        "ended",
        "env_id",
        "env_version",
        "kwargs",
        "most",
        "options",
        "request_id",
        "reseeds",
        "seed",
    )

    def __init__(self, env_id: str, env_version: str, kwargs: dict[str, Any]) -> None:
        self.env_id = env_id
        self.env_version = env_version
        self.kwargs = kwargs
        self.seed: int | None = None
        self.options: dict[str, Any] | None = None
        self.actions: list[Any] = []
        self.reseeds: list[tuple[int, int]] = []
        self.ended = (False, False)
        self.before: EndedStep | None = None
        self.request_id: str | None = None
        self._measured = 0
        self._measured_size = 0
        self.most = 0
        self._reset: str | None = None
        self._digests = bytearray()
        self._pending: list[tuple[Any, float, bool, bool]] = []
        self._pending_text = 0

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return len(self.actions)

    @property
    def reset_digest(self) -> str | None:
        """The digest of the reset's return value; None before the first one."""
        return self._reset

    @property
    def digests(self) -> list[str]:
        """One digest for each action."""
        return unpacked(self.packed_digests())

    def each_digest(self) -> Iterator[str]:
        """Give one digest for each action, without a list of them."""
        self._settle()
        for at in range(0, len(self._digests), DIGEST_BYTES):
            yield self._digests[at : at + DIGEST_BYTES].hex()

    @property
    def pending_outcome(self) -> tuple[Any, float, bool, bool] | None:
        """The return value of the last step, if its digest has not been computed yet."""
        return self._pending[-1] if self._pending else None

    def packed_digests(self) -> bytes:
        """The digests of all actions, end to end."""
        self._settle()
        return bytes(self._digests)

    def last_digest(self) -> bytes:
        """The digest of the last step."""
        self._settle()
        return bytes(self._digests[-DIGEST_BYTES:])

    def begin(
        self,
        seed: int,
        options: dict[str, Any] | None,
        observation: Any,
        *,
        before: EndedStep | None = None,
        request_id: str | None = None,
    ) -> None:
        """Replace the journal's content by a new episode."""
        self._start(seed, options, step_digest(observation, 0.0, False, False), [], bytearray(), [])
        self.before = before
        self.request_id = request_id

    def record(self, action: Any, observation: Any, reward: float, terminated: bool, truncated: bool) -> None:
        """Append a step to the episode."""
        self.actions.append(action)
        most = _LONGEST_SIGN * len(action) + 2 if type(action) is str else _most(action)
        self.most += most + _STEP_BYTES
        self.ended = (terminated, truncated)
        pending = self._pending
        pending.append((observation, reward, terminated, truncated))
        kind = type(observation)
        if kind is str:
            size = len(observation)
            self._pending_text += size
            if size > _MAX_PENDING_TEXT or self._pending_text > _MAX_PENDING_TEXTS:
                self._settle()
                return
        elif kind is not int:
            self._settle()
            return
        if len(pending) >= _MAX_PENDING:
            self._settle()

    def recall(self, action: Any, digest: bytes, ended: tuple[bool, bool]) -> None:
        """Append a step of which only the digest is known."""
        self._settle()
        self.actions.append(action)
        self.most += _most(action) + _STEP_BYTES
        self._digests += digest
        self.ended = ended

    def reseed(self, seed: int) -> None:
        """Record that the generator got a new seed."""
        self.reseeds.append((self.steps, seed))
        self._measured_size += _RESEED_BYTES
        self.most += _RESEED_BYTES

    @property
    def size(self) -> int:
        """How many bytes the portable episode has, its envelope apart; each action is measured once."""
        new = self.actions[self._measured :]
        self._measured = len(self.actions)
        self._measured_size += sum(map(_size, new)) + _STEP_BYTES * len(new)
        self.most = self._measured_size
        return self._measured_size

    def size_with(self, action: Any) -> int:
        """The size that the episode would have with one more action."""
        return self.size + _size(action) + _STEP_BYTES

    def portable(self, episode: int, digests: list[str] | None = None) -> PortableEpisode:
        """The journal as others can use it.

        Args:
            episode: The index of the episode in its session.
            digests: Its digests, if they were unpacked before.
        """
        # A journal's contents have been validated already, and may be large.
        return PortableEpisode.model_construct(
            env_id=self.env_id,
            env_version=self.env_version,
            kwargs=self.kwargs,
            episode=episode,
            seed=self.seed,
            options=self.options,
            reset_digest=self._reset,
            actions=list(self.actions),
            digests=self.digests if digests is None else digests,
            reseeds=list(self.reseeds),
        )

    @classmethod
    def from_portable(cls, episode: PortableEpisode) -> "Journal":
        """A journal that continues a portable episode.

        Raises:
            ValueError: A digest is not one.
        """
        journal = cls(episode.env_id, episode.env_version, episode.kwargs)
        if episode.seed is not None and episode.reset_digest is not None:
            journal.resume(
                episode.seed,
                episode.options,
                episode.reset_digest,
                episode.actions,
                bytes.fromhex("".join(episode.digests)),
                episode.reseeds,
            )
        return journal

    def resume(
        self,
        seed: int,
        options: dict[str, Any] | None,
        reset_digest: str,
        actions: Sequence[Any],
        digests: bytes,
        reseeds: Sequence[tuple[int, int]],
    ) -> None:
        """Resume in the middle of an episode.

        Raises:
            ValueError: The numbers of digests and of actions differ.
        """
        if len(digests) != DIGEST_BYTES * len(actions):
            raise ValueError(f"{len(digests) / DIGEST_BYTES:g} digests came for {len(actions)} actions")
        self._start(seed, options, reset_digest, list(actions), bytearray(digests), list(reseeds))

    def _start(
        self,
        seed: int,
        options: dict[str, Any] | None,
        reset_digest: str,
        actions: list[Any],
        digests: bytearray,
        reseeds: list[tuple[int, int]],
    ) -> None:
        self.seed = seed
        self.options = options
        self.actions = actions
        self._measured = 0
        self._measured_size = sum(_size(each) for each in (self.kwargs, options) if each)
        self._measured_size += _RESEED_BYTES * len(reseeds)
        self.most = self._measured_size + sum(map(_most, actions)) + _STEP_BYTES * len(actions)
        self.reseeds = reseeds
        self.ended = (False, False)
        self.before = None
        self.request_id = None
        self._reset = reset_digest
        self._digests = digests
        self._pending = []
        self._pending_text = 0

    def _settle(self) -> None:
        """Make the digests that were put off."""
        for outcome in self._pending:
            self._digests += bytes.fromhex(step_digest(*outcome))
        self._pending.clear()
        self._pending_text = 0


class ReplayDiverged(Exception):  # noqa: N818 - the name says what happened
    """The environment's replay differs from the journal."""


class RebuiltPoint(NamedTuple):
    """The point that a replay has brought an environment to.

    Attributes:
        action_space: The environment's action space.
        observation_space: Its observation space.
        first: The return value of the reset; None if there was no reset.
        last: The return value of the last step; None if no step was taken.
    """

    action_space: Space[Any]
    observation_space: Space[Any]
    first: tuple[Any, Mapping[str, Any]] | None
    last: StepOutcome | None


async def rebuild(
    worker: Worker,
    key: str,
    source: EnvSource,
    kwargs: Mapping[str, Any],
    journal: Journal,
    *,
    timeout: float | None,
    slices: Slices,
) -> RebuiltPoint:
    """Rebuild an environment from a journal: make it, reset it, and take all steps again.

    Args:
        worker: The worker that will hold it.
        key: Its key there.
        source: Its entry point and arguments.
        kwargs: The client's kwargs.
        journal: The actions to replay; the environment must be deterministic.
        timeout: The time-out of each operation, in seconds.
        slices: Schedules replays that run in the event loop, so that other tasks get their turns in between.

    Raises:
        ReplayDiverged: The environment behaved differently this time; the worker holds nothing under the key.
        EnvironmentRaised: Its constructor raised.
        OperationTimeout: An operation took too long.
        WorkerLost: The worker died.
    """
    action_space, observation_space = await worker.make(key, source, kwargs, timeout=timeout)
    try:
        first, last = await _replay(worker, key, action_space, observation_space, journal, timeout, slices)
    except ReplayDiverged:
        await worker.close(key)
        raise
    if last is not None:
        journal.ended = (bool(last.terminated), bool(last.truncated))
    return RebuiltPoint(action_space, observation_space, first, last)


async def _replay(
    worker: Worker,
    key: str,
    action_space: Space[Any],
    observation_space: Space[Any],
    journal: Journal,
    timeout: float | None,
    slices: Slices,
) -> tuple[tuple[Any, Mapping[str, Any]] | None, StepOutcome | None]:
    if journal.seed is None:
        return None, None
    read_action = action_reader(action_space)
    # Of several at one step, the last one alone has an effect: it is all that the generator knows.
    reseeds = dict(journal.reseeds)
    number = -1
    last: StepOutcome | None = None
    try:
        observation, info = await worker.reset(
            key, journal.seed, decode_value(None, journal.options), timeout=timeout
        )
        _compare(observation_space, StepOutcome(observation, 0.0, False, False, {}), journal.reset_digest)
        for number, (action, digest) in enumerate(zip(journal.actions, journal.each_digest(), strict=True)):
            if number in reseeds:
                await slices.turn()
                await worker.reseed(key, reseeds[number], timeout=timeout)
            await slices.turn()
            last = await worker.step(key, read_action(action)[0], timeout=timeout)
            _compare(observation_space, last, digest)
        if journal.steps in reseeds:
            await slices.turn()
            await worker.reseed(key, reseeds[journal.steps], timeout=timeout)
    except (EnvironmentRaised, EncodeError, ProblemError, _Differs) as error:
        place = "the reset" if number < 0 else f"step {number}"
        raise ReplayDiverged(f"{place} went another way than before: {error}") from error
    return (observation, info), last


class _Differs(Exception):  # noqa: N818 - never leaves this module
    """A return value has another digest."""


def _compare(space: Space[Any], outcome: StepOutcome, expected: str | None) -> None:
    seen = encode_value(space, outcome.observation, binary=False)
    digest = step_digest(seen, outcome.reward, outcome.terminated, outcome.truncated)
    if digest != expected:
        raise _Differs(f"its digest is {digest}, not {expected}")
