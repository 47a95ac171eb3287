"""A task: which environment, with which kwargs, from which seed. And the stream of tasks that a run plays."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class RewardPart:
    """A verifier that scores a task's response beside the one that it is played with.

    Attributes:
        name: What its share of the reward is called.
        verifier: Its environment id.
        weight: What its score is multiplied by.
        gate: The score that it must give, or the response earns nothing; None if it does not act as a gate.
        fields: Its task fields that come from fields of the task, by their names there.
        task: Fields that every task has for it.
        url: Its server; None for the run's default.
    """

    name: str
    verifier: str
    weight: float
    gate: float | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    url: str | None = None


@dataclass(frozen=True, slots=True)
class RewardMixture:
    """What a task's reward is made of.

    Attributes:
        own: What the reward of the environment itself is multiplied by.
        parts: The others.
    """

    own: float
    parts: tuple[RewardPart, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to play. Equal tasks give equal first observations.

    Attributes:
        index: Index in the stream that the task comes from.
        env_id: The environment, as its server lists it.
        kwargs: What the environment is made with.
        seed: What it is reset with.
        options: What else it is reset with.
        domain: Name under which metrics of this kind of task are reported.
        url: The server; None for the run's default.
        mixture: Other verifiers that have a part in the reward; None where the environment's is all.
        row: Where the options come from if they are this task's own, such as a row of a data set; empty where tasks of
            their kind have them in common. It is for messages.
    """

    index: int
    env_id: str
    seed: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] | None = None
    domain: str = ""
    url: str | None = None
    mixture: RewardMixture | None = None
    row: str = field(default="", compare=False)

    @property
    def mixture_parts(self) -> tuple[RewardPart, ...]:
        """The other verifiers that have a part in the reward."""
        return self.mixture.parts if self.mixture is not None else ()

    @property
    def session_key(self) -> str:
        """Tasks with equal keys can be played in one session, one after the other."""
        return json.dumps([self.url, self.env_id, self.kwargs], sort_keys=True)

    def as_dict(self) -> dict[str, Any]:
        """Return the task as plain data."""
        return {
            "index": self.index,
            "env_id": self.env_id,
            "kwargs": dict(self.kwargs),
            "seed": self.seed,
            "options": dict(self.options) if self.options is not None else None,
            "domain": self.domain,
            "url": self.url,
        } | self._rare()

    def _rare(self) -> dict[str, Any]:
        """Return what most tasks have nothing of."""
        rare: dict[str, Any] = {}
        if self.mixture is not None:
            parts = [_as_dict(part) for part in self.mixture.parts]
            rare["mixture"] = _as_dict(self.mixture) | {"parts": parts}
        if self.row:
            rare["row"] = self.row
        return rare


def _as_dict(of: RewardMixture | RewardPart) -> dict[str, Any]:
    return {each.name: getattr(of, each.name) for each in fields(of)}


class TaskSource(Protocol):
    """An endless stream of tasks.

    `task` is a pure function of the index, so the data cursor of a run is one number, an asynchronous run plays the
    same stream as a synchronous one, and a task can be issued again after a crash.
    """

    def task(self, index: int) -> Task:
        """Return the task at `index`."""
        ...
