"""Resumes episodes of earlier processes from the rollout log.

A replayed episode is answered from the log for as long as its requests equal those that were logged: replies are
found by the exact prompt, the environment's answers by the exact action. So the code that played the episode plays it
again, ours or a restarted agent's, and no token is sampled twice and no step is taken twice. Where the log ends, the
environment's session is brought to that point, and the episode continues. A new answer is on disk before it is
returned. If an agent's requests differ from the log, its replies are sampled; unused log entries are counted.
"""

import asyncio
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from rollgym.trainer.inference.base import GenerationRequest, GenerationResult
from rollgym.trainer.records.experts import ExpertsReader, ExpertsWriter
from rollgym.trainer.records.rollout_log import Entry, EpisodeKey, RolloutLog
from rollgym.trainer.records.schema import runs
from rollgym.trainer.records.trajectory import Outcome, Trajectory

TRAINING = "train"
"""Purpose of the episodes that are logged."""

RESET, STEP = "reset", "step"
"""Kinds of requests to an environment."""
_REPLY, _CUT, _END = "reply", "cut", "end"
_FIELDS = {RESET: 4, STEP: 6}
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


class Recall:
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
        self._playing: dict[str, EpisodeTape] = {}
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
    def playing(self, key: EpisodeKey) -> "Iterator[EpisodeTape]":
        """Hand out the tape of an episode while it is played."""
        past = self._past.pop(key, _Past())
        if past.ended is None and key._replace(attempt=key.attempt + 1) in self._past:
            past.ended = Outcome.TIMEOUT.value, "given up before the run was resumed"
        tape = EpisodeTape(self, key, past)
        if key in self._begun:
            tape.cut(0)  # this process has played it before, but not to its end
        self._begun.add(key)
        name = session_key(TRAINING, *key)
        self._playing[name] = tape
        try:
            yield tape
            if past.ended is None:
                self.counters.update(tape.unasked())
        finally:
            if self._playing.get(name) is tape:
                del self._playing[name]

    def tape(self, name: str) -> "EpisodeTape | None":
        """Return the tape of the episode that inference clients know by this name, if it is logged."""
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


class EpisodeTape:
    """One attempt at an episode: the part of the log that is not replayed yet, and what the attempt adds.

    Args:
        recall: The run's rollout log.
        key: The episode.
        past: What the log has of the episode.
    """

    def __init__(self, recall: Recall, key: EpisodeKey, past: _Past) -> None:
        self._recall = recall
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
        self._recall.counters.update(replies=1, tokens=len(result.token_ids))
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
            self._experts.fields(result.experts),
        )

    def unasked(self) -> dict[str, int]:
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
            self._recall.counters["episodes"] += 1
        self._append(_CUT, index)

    def end(self, trajectory: Trajectory) -> None:
        """Write down that the attempt failed, so that it is not resumed."""
        self._append(_END, trajectory.outcome.value, trajectory.detail)

    def _append(self, kind: str, *fields: Any) -> None:
        self._recall.log.append(Entry(kind, self._key, fields))


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
