"""Resumes episodes of earlier processes from the rollout log.

A replayed episode is answered from the log for as long as its requests equal those that were logged: replies are
found by the exact prompt, the environment's answers by the exact action. So the code that played the episode plays it
again, ours or a restarted agent's, and no token is sampled twice and no step is taken twice. Where the log ends, the
environment's session is brought to that point, and the episode continues. A new answer is on disk before it is
returned. If an agent's requests differ from the log, its replies are sampled; unused log entries are counted.

A `LoggedClient` does so for an inference client, and a `LoggedSession` for an environment's session.
"""

import asyncio
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from gymnasium import Space

from rollgym.clients.client.operation import ResetResult, StepResult
from rollgym.clients.client.session import EnvSession
from rollgym.clients.protocol.episode import PortableEpisode, step_digest
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import EnvInfo
from rollgym.clients.protocol.values import decode_value, encode_value
from rollgym.trainer.inference.base import GenerationRequest, GenerationResult, InferenceClient
from rollgym.trainer.inference.forwarding import ForwardingClient
from rollgym.trainer.records.experts import ExpertsReader, ExpertsWriter
from rollgym.trainer.records.rollout_log import Entry, EpisodeKey, RolloutLog
from rollgym.trainer.records.schema import runs
from rollgym.trainer.records.trajectory import Trajectory, TrajectoryOutcome

TRAINING = "train"
"""Purpose of the episodes that are logged."""

_RESET, _STEP = "reset", "step"
"""Kinds of requests to an environment."""
_REPLY, _CUT, _END = "reply", "cut", "end"
_FIELDS = {_RESET: 4, _STEP: 6}
"""Fields of an environment's answers, without the index that they have among the episode's."""


def session_key(purpose: str, task: int, member: int, attempt: int) -> str:
    """Return what inference clients know an episode by."""
    return f"{purpose}-{task}-{member}-{attempt}"


_Drawn = tuple[int | None, GenerationResult]


@dataclass(slots=True)
class _Past:
    """An earlier process's log of one attempt at an episode.

    Attributes:
        replies: By prompt, in order, each with the seed that it was drawn with.
        answers: Resets and steps of the environment, in order.
        ended: Outcome and detail, if it failed.
        experts: Puts those that replies' tokens took together.
    """

    replies: defaultdict[bytes, list[_Drawn]] = field(default_factory=lambda: defaultdict(list))
    answers: list[Entry] = field(default_factory=list)
    ended: tuple[str, str] | None = None
    experts: ExpertsReader = field(default_factory=ExpertsReader)


class LogReplay:
    """The logged episodes of earlier processes, and the log for those of this one.

    Args:
        log: The run's log.

    Attributes:
        log: The run's log.
        counters: What was replayed: `replies`, `tokens`, restarted `episodes`; and of episodes that asked
            otherwise than before, `unasked_replies` and `unasked_tokens` that the log had for them in vain.
    """

    def __init__(self, log: RolloutLog) -> None:
        self.log = log
        self.counters: Counter[str] = Counter()
        self._past: dict[EpisodeKey, _Past] = {}
        self._begun: set[EpisodeKey] = set()
        self._playing: dict[str, EpisodeReplay] = {}
        for entry in log.read():
            _take_in(self._past.setdefault(entry.key, _Past()), entry)

    @property
    def found(self) -> tuple[int, int, int]:
        """Return how many episodes, replies and tokens wait to be replayed."""
        drawn = [each for past in self._past.values() for each in past.replies.values()]
        replies = [reply for each in drawn for _, reply in each]
        return len(self._past), len(replies), sum(len(reply.token_ids) for reply in replies)

    def rounds(self, max_attempts: int) -> dict[int, int]:
        """Return how often tasks were put aside by earlier processes, for those that were resumed after it.

        Args:
            max_attempts: Attempts at an episode in one round.
        """
        latest: dict[int, int] = {}
        for key in self._past:
            latest[key.task] = max(latest.get(key.task, 0), key.attempt // max_attempts)
        return latest

    @contextmanager
    def playing(self, key: EpisodeKey) -> "Iterator[EpisodeReplay]":
        """Hand out the replay of an episode while it is played."""
        past = self._past.pop(key, _Past())
        if past.ended is None and key._replace(attempt=key.attempt + 1) in self._past:
            past.ended = TrajectoryOutcome.TIMEOUT.value, "given up before the run was resumed"
        replay = EpisodeReplay(self, key, past)
        if key in self._begun:
            replay.cut(0)  # this process has played it before, but not to its end
        self._begun.add(key)
        name = session_key(TRAINING, *key)
        self._playing[name] = replay
        try:
            yield replay
            if past.ended is None:
                self.counters.update(replay.unused_replies())
        finally:
            if self._playing.get(name) is replay:
                del self._playing[name]

    def replay(self, name: str) -> "EpisodeReplay | None":
        """Return the replay of the episode that inference clients know by this name, if it is logged."""
        return self._playing.get(name)

    async def settle(self, next_task: int, untrained: Sequence[int]) -> None:
        """Forget what a checkpoint holds; see `RolloutLog.settle`. Files go in a thread.

        Raises:
            WriteError: If the disk fails.
        """
        work = self.log.settle(next_task, untrained)
        waiting = set(untrained)
        self._begun = {key for key in self._begun if key.task >= next_task or key.task in waiting}
        await asyncio.to_thread(work)


class EpisodeReplay:
    """One attempt at an episode: the part of the log that is not replayed yet, and what the attempt adds.

    Args:
        log_replay: The run's rollout log.
        key: The episode.
        past: What the log has of the episode.
    """

    def __init__(self, log_replay: LogReplay, key: EpisodeKey, past: _Past) -> None:
        self._log_replay = log_replay
        self._key = key
        self._past = past
        self._answered = 0
        self._added = 0
        self._experts = ExpertsWriter()

    @property
    def ended(self) -> tuple[str, str] | None:
        """Outcome and detail of an attempt that failed, if it did."""
        return self._past.ended

    @property
    def goes_on(self) -> bool:
        """Whether the log has another answer of the environment."""
        return self._answered < len(self._past.answers)

    @property
    def answers(self) -> list[Entry]:
        """The environment's answers that were given from the log so far."""
        return self._past.answers[: self._answered]

    def reply(self, request: GenerationRequest) -> GenerationResult | None:
        """Return the logged reply to a request and use it up; None without one."""
        if not self._past.replies:
            return None  # the usual case, and hashing a long prompt is costly
        waiting = self._past.replies.get(_digest(request))
        if not waiting:
            return None
        # Several replies to one prompt are returned in the order in which they were logged.
        seeds = [seed for seed, _ in waiting]
        _, result = waiting.pop(seeds.index(request.seed) if request.seed in seeds else 0)
        self._log_replay.counters.update(replies=1, tokens=len(result.token_ids))
        return result

    def replied(self, request: GenerationRequest, result: GenerationResult) -> None:
        """Write a reply down; it is safe once the log has committed it.

        Raises:
            WriteError: If the disk does not take it.
        """
        self._append(
            _REPLY,
            _digest(request),
            array("q", result.token_ids).tobytes(),
            array("d", result.logprobs).tobytes(),
            runs(result.policy_versions),
            result.finish_reason,
            request.seed,
            None if result.experts is None else self._experts.fields(result.experts),
        )

    def unused_replies(self) -> dict[str, int]:
        """Count the replies of the log that were not asked for, and their tokens."""
        left = [reply for each in self._past.replies.values() for _, reply in each]
        if not left:
            return {}
        return {"unasked_replies": len(left), "unasked_tokens": sum(len(each.token_ids) for each in left)}

    def answer(self, kind: str, asked: object) -> Entry | None:
        """Return the environment's next logged answer and use it up; None if missing or for another question."""
        if not self.goes_on:
            return None
        entry = self._past.answers[self._answered]
        if (entry.kind, entry.fields[0]) != (kind, asked):
            return None
        self._answered += 1
        return entry

    def answered(self, kind: str, *fields: Any) -> None:
        """Write an answer of the environment down; what the log had in its place is void."""
        if self.goes_on:
            self.cut(self._answered)
        # Its index among the episode's answers: the reader of later answers notices if one was lost.
        self._append(kind, *fields, self._answered + self._added)
        self._added += 1

    def cut(self, index: int) -> None:
        """Invalidate the environment's answers from an index on; index 0 restarts the episode."""
        del self._past.answers[index:]
        self._answered = min(self._answered, index)
        if index == 0:
            self._added = 0
            self._past.replies.clear()
            self._log_replay.counters["episodes"] += 1
        self._append(_CUT, index)

    def end(self, trajectory: Trajectory) -> None:
        """Write down that the attempt failed, so that it is not resumed."""
        self._append(_END, trajectory.outcome.value, trajectory.detail)

    def _append(self, kind: str, *fields: Any) -> None:
        self._log_replay.log.append(Entry(kind, self._key, fields))


def _take_in(past: _Past, entry: Entry) -> None:
    if entry.kind == _REPLY:
        digest, ids, logprobs, versions, reason, *later = entry.fields
        seed, experts = [*later, None, None][:2]  # earlier releases wrote neither
        try:
            taken = past.experts.read(experts)
        except ValueError:
            return  # of a file that was damaged: the reply is drawn again, with the experts that it then takes
        reply = GenerationResult(
            array("q", ids).tolist(),
            array("d", logprobs).tolist(),
            [version for version, count in versions for _ in range(count)],
            reason,
            taken,
        )
        past.replies[digest].append((seed, reply))
    elif entry.kind in _FIELDS:
        own, placed = entry.fields[: _FIELDS[entry.kind]], entry.fields[_FIELDS[entry.kind] :]
        index = placed[0] if placed else len(past.answers)  # earlier releases did not say it
        if index <= len(past.answers):  # else one before it was lost, and it answers something else
            past.answers[index:] = [entry._replace(fields=own)]
    elif entry.kind == _CUT:
        del past.answers[entry.fields[0] :]
        if entry.fields[0] == 0:
            past.replies.clear()
    elif entry.kind == _END:
        past.ended = entry.fields[0], entry.fields[1]


def _digest(request: GenerationRequest) -> bytes:
    """Name a prompt and how its reply is drawn."""
    content = array("q", request.prompt_ids).tobytes() + repr(request.sampling).encode()
    if request.sampling.structured is not None:
        content += repr(request.sampling.structured).encode()
    shown = b"".join(image.picture.digest for image in request.images)
    return blake2b(content + shown, digest_size=16).digest()


class LoggedClient(ForwardingClient):
    """An inference client that logs each reply before it returns it, and replays those that the log has.

    Args:
        client: The client that samples new replies.
        log_replay: The run's episodes.
    """

    def __init__(self, client: InferenceClient, log_replay: LogReplay) -> None:
        super().__init__(client)
        self._log_replay = log_replay

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Return the logged reply, or a new one once it is logged.

        Raises:
            WriteError: If the disk does not take it.
        """
        replay = self._log_replay.replay(request.session_key)
        if replay is None:
            return await self._client.generate(request)
        logged = replay.reply(request)
        if logged is not None:
            return logged
        result = await self._client.generate(request)
        replay.replied(request, result)
        await self._log_replay.log.commit()
        return result

    async def generate_together(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        """Return the replies of one batch. It is computed whole if the log lacks any of them.

        Sums depend on a batch's composition, so those that the log lacks come out as they would have, and the others as
        they are in the log.
        """
        replays = [self._log_replay.replay(request.session_key) for request in requests]
        logged = [
            None if replay is None else replay.reply(request)
            for replay, request in zip(replays, requests, strict=True)
        ]
        if all(result is not None for result in logged):
            return [result for result in logged if result is not None]
        results = await self._client.generate_together(requests)
        for index, (replay, known) in enumerate(zip(replays, logged, strict=True)):
            if known is not None:
                results[index] = known
            elif replay is not None:
                replay.replied(requests[index], results[index])
        await self._log_replay.log.commit()
        return results


class EpisodeLostError(Exception):
    """The environment of an episode cannot be brought to the end of the log."""


class LoggedSession:
    """A session that logs each answer before it returns it, and replays the answers that the log has.

    Args:
        session: The underlying session.
        replay: The episode.

    Attributes:
        episode: Index of the episode in the session that the log has, or in the underlying one.
        step_index: Steps taken in the episode, from the log and since.
        seed: Seed of the episode.
        lost: The error that made the episode impossible to resume; None if there was none.
    """

    def __init__(self, session: EnvSession, replay: EpisodeReplay) -> None:
        self._session = session
        self._replay = replay
        self._is_there = True
        self._note_place()
        self.lost: EpisodeLostError | None = None

    @property
    def session_id(self) -> str:
        """The server's id of the session; see `Session`."""
        return self._session.session_id

    @property
    def env(self) -> EnvInfo:
        """The server's description of the environment; see `Session`."""
        return self._session.env

    @property
    def env_id(self) -> str:
        """The environment's id; see `Session`."""
        return self._session.env_id

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The environment's arguments; see `Session`."""
        return self._session.kwargs

    @property
    def action_space(self) -> Space[Any]:
        """The environment's action space; see `Session`."""
        return self._session.action_space

    @property
    def observation_space(self) -> Space[Any]:
        """The environment's observation space; see `Session`."""
        return self._session.observation_space

    async def render(self, mode: str | None = None) -> Any:
        """Render the environment's state; see `EnvSession.render`."""
        await self._catch_up()
        return await self._session.render(mode)

    async def fork(self, count: int = 1, reseed: int | None = None) -> list[EnvSession]:
        """Make independent copies at this point; see `EnvSession.fork`. Their answers are not logged."""
        await self._catch_up()
        return await self._session.fork(count, reseed)

    async def episode_record(self) -> PortableEpisode:
        """Return the portable episode; see `EnvSession.episode_record`."""
        await self._catch_up()
        return await self._session.episode_record()

    async def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        """Begin an episode; see `EnvSession.reset`.

        Raises:
            EpisodeLostError: If the log ends here, and the session cannot be brought here.
        """
        asked = [seed, encode_value(None, options, binary=False)]
        logged = self._replay.answer(_RESET, asked)
        if logged is not None:
            self._is_there = False
            _, (_, _, self.episode, self.seed, _), observation, info = logged.fields
            self.step_index = 0
            await self._catch_up_at_the_end()
            return ResetResult(self._observation(observation), decode_value(None, info))
        result = await self._session.reset(seed, options)
        self._is_there = True
        session = self._session
        self._note_place()
        place = [session.session_id, session.process, session.episode, session.seed, session.env.version]
        self._replay.answered(_RESET, asked, place, self._neutral(result.observation), _packed(result.info))
        return result

    async def step(
        self, action: Any, *, autoreset: bool = False, timeout_s: float | None = None
    ) -> StepResult:
        """Take one action; see `EnvSession.step`.

        Raises:
            EpisodeLostError: If the session cannot be brought to the end of the log.
        """
        given = {"autoreset": autoreset, "timeout_s": timeout_s}
        options = {name: value for name, value in given.items() if value}  # as earlier releases wrote it
        asked = [encode_value(self._session.action_space, action, binary=False), options]
        logged = self._replay.answer(_STEP, asked)
        if logged is not None:
            self._is_there = False
            _, observation, reward, terminated, truncated, info = logged.fields
            self.step_index += 1
            if not (terminated or truncated):
                await self._catch_up_at_the_end()
            return StepResult(
                self._observation(observation), reward, terminated, truncated, decode_value(None, info)
            )
        await self._catch_up()
        result = await self._session.step(action, autoreset=autoreset, timeout_s=timeout_s)
        self._note_place()
        self._replay.answered(
            _STEP,
            asked,
            self._neutral(result.observation),
            result.reward,
            result.terminated,
            result.truncated,
            _packed(result.info),
        )
        return result

    def _note_place(self) -> None:
        session = self._session
        self.episode, self.step_index, self.seed = session.episode, session.step_index, session.seed

    async def _catch_up_at_the_end(self) -> None:
        """Bring the session to the end of the log before sampling, which would be in vain if that failed."""
        if not self._replay.goes_on:
            await self._catch_up()

    async def _catch_up(self) -> None:
        """Bring the session to the episode's present state, if its answers came from the log.

        Raises:
            EpisodeLostError: If that cannot be done.
        """
        if self._is_there:
            return
        answers = self._replay.answers
        begin = max(index for index, entry in enumerate(answers) if entry.kind == _RESET)
        reset, steps = answers[begin], answers[begin + 1 :]
        asked, place, observation, _ = reset.fields
        (_, options), (session_id, process, episode, seed, version) = asked, place
        portable = PortableEpisode(
            env_id=self._session.env_id,
            env_version=version,
            kwargs=encode_value(None, self._session.kwargs, binary=False),
            episode=episode,
            seed=seed,
            options=options,
            reset_digest=step_digest(observation, 0.0, False, False),
            actions=[entry.fields[0][0] for entry in steps],
            digests=[step_digest(*entry.fields[1:5]) for entry in steps],
        )
        try:
            await self._session.resume(portable, (session_id, process))
        except ProblemError as problem:
            self.lost = EpisodeLostError(str(problem))
            raise self.lost from problem
        self._is_there = True

    def _observation(self, wire: Any) -> Any:
        return decode_value(self._session.observation_space, wire)

    def _neutral(self, observation: Any) -> Any:
        return encode_value(self._session.observation_space, observation, binary=False)


def _packed(info: Any) -> Any:
    return encode_value(None, info, binary=True)
