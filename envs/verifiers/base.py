"""A verifier is an environment of one step: a task is shown, a response is scored, the episode is over."""

from abc import abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import gymnasium

from rollgym.clients.protocol.spaces import UnicodeText
from rollgym.envs.core.kwargs import DeclaredKwargs, RenderMode
from rollgym.envs.core.splits import checked_split, split_of_text

Outcome = Literal["correct", "wrong", "partial", "unparsable", "timeout", "error"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a response is worth.

    Attributes:
        score: Between 0 and 1.
        outcome: In a word; `timeout` and `error` are faults of ours and never mean a score of 0.
        detail: What was read and what was expected, for people.
        metrics: Other numbers of the response, beside the score; an episode has them in its info.
    """

    score: float
    outcome: Outcome
    detail: str
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)


def shortened(text: str, most: int = 80) -> str:
    """Return a text as a verdict's detail shows it, cut to `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


class VerifierEnv(DeclaredKwargs, gymnasium.Env[str, str]):
    """Base of all verifiers. One instance can score any number of responses, each by itself."""

    metadata: dict[str, Any] = {
        "observation": "The question; after the response, what the verdict says.",
        "actions": "The response. What stands in think tags is not looked at.",
        "reward": "The verdict's score, from 0 to 1. Success is the outcome `correct`.",
        "render_modes": ["ansi"],
        "render_fps": 1,
        "kind": "stateless",
        "inline": True,
        "deterministic": True,
        "forkable": True,
        "metrics": {"score": "last"},
        "version": "0",
        "max_episode_steps": 1,
    }

    def __init__(self, *, render_mode: RenderMode = None) -> None:
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()
        self.render_mode = render_mode
        self._task: Mapping[str, Any] = {}
        self._shows_task = False
        self._prompt = ""

    @abstractmethod
    def draw_task(self) -> Mapping[str, Any]:
        """Draw a task from `self.np_random`."""

    @abstractmethod
    def checked_task(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a task that a caller gave.

        Raises:
            ValueError: If a field is missing or makes no sense.
        """

    def prompt(self, task: Mapping[str, Any]) -> str:
        """Return what the policy is asked: the question, unless a verifier's tasks have more to show."""
        return str(task["question"])

    @abstractmethod
    def instruction(self) -> str:
        """Return how it should answer."""

    @abstractmethod
    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        """Score a response; no text raises."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Draw a task, or take the one whose fields the options are.

        A task holds its answer, and so it is never shown. The option `expert`, which a server refuses unless its
        operator allows it, puts it into `info["state"]["task"]`, for tests and audits.
        """
        super().reset(seed=seed)
        fields = dict(options or {})
        self._shows_task = bool(fields.pop("expert", False))
        self._task = self.checked_task(fields) if fields else self.draw_task()
        self._prompt = self.prompt(self._task)
        info = {
            "instruction": self.instruction(),
            "success": False,
            "action_is_valid": True,
            "state": self._state(),
            "anchor": "0",
            "optimal_steps": 1,
        }
        return self._prompt, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score the response; the episode is over."""
        verdict = self.score(action, self._task)
        info = {
            "success": verdict.outcome == "correct",
            "action_is_valid": verdict.outcome != "unparsable",
            "format_penalty": 0.0,
            "env_reward": verdict.score,
            "outcome": verdict.outcome,
            "detail": verdict.detail,
            "metrics": {"score": verdict.score, **verdict.metrics},
            "state": self._state(),
            "anchor": "1",
        }
        return verdict.detail, verdict.score, True, False, info

    def render(self) -> Any:
        """Return the task as text."""
        return self._prompt if self.render_mode == "ansi" else None

    @property
    def task(self) -> dict[str, Any]:
        """The fields of the task, with its answer: for code that holds this object, never for a client."""
        return deepcopy(dict(self._task))

    def _state(self) -> dict[str, Any]:
        return {"task": self.task} if self._shows_task else {}


class GeneratingVerifier(VerifierEnv):
    """Base of verifiers that generate their tasks, of all splits or of one.

    Args:
        split: Only tasks of this split, by content.
        render_mode: As in Gymnasium.
    """

    tries: ClassVar[int] = 10_000

    def __init__(self, *, split: str | None, render_mode: RenderMode) -> None:
        super().__init__(render_mode=render_mode)
        self._split = checked_split(split)

    @abstractmethod
    def generate_task(self) -> dict[str, Any]:
        """Generate a task from `self.np_random`, of whichever split."""

    def content(self, task: Mapping[str, Any]) -> str:
        """Return the text that decides to which split a task belongs."""
        return str(task["question"])

    def draw_task(self) -> dict[str, Any]:
        """Generate tasks until one is of the wanted split.

        Raises:
            ValueError: None is, after many.
        """
        for _ in range(self.tries):
            task = self.generate_task()
            if self._split is None or split_of_text(self.content(task)) == self._split:
                return task
        raise ValueError(
            f"no task of split {self._split} in {self.tries} tries: allow more kinds of tasks than these kwargs do"
        )
