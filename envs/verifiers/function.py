"""Verifiers of few lines: a function that scores, and the tasks that it scores replies to."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, Protocol, get_args

import numpy as np

from rollgym.envs.core.kwargs import RenderMode
from rollgym.envs.verifiers.base import Outcome, Verdict, VerifierEnv

Task = Mapping[str, Any]
DrawTask = Callable[[np.random.Generator], Task]
Score = bool | float | Verdict


class ScoreFunction(Protocol):
    """What `verifier` makes a verifier of."""

    __name__: str
    __module__: str

    def __call__(self, response: str, task: Task, /) -> Score:
        """Return what a response is worth, from 0 to 1, or whether it is right."""


class TaskVerifier(VerifierEnv):
    """Base of verifiers whose tasks are at hand: a subclass names them, and says what a response is worth.

        class Exact(TaskVerifier):
            tasks = [{"question": "What is 6 * 7?", "answer": "42"}]

            def worth(self, response, task):
                return response.strip() == task["answer"]

    `roll-serve --env my_module:Exact` serves it. What `worth` raises is an error of the verifier, never a score of 0.

    Attributes:
        tasks: Mappings, each with the field `question`; or a function that draws one from a random generator, which is
            seeded with the episode.
        instructs: How the policy should answer.
    """

    tasks: ClassVar[Sequence[Task] | DrawTask] = ()
    instructs: ClassVar[str] = "Answer the question."

    def __init__(self, *, render_mode: RenderMode = None) -> None:
        super().__init__(render_mode=render_mode)
        if not callable(self._tasks) and not self._tasks:
            raise ValueError(f"{type(self).__name__} has no tasks: name them in its attribute `tasks`")

    def worth(self, response: str, task: Task) -> Score:
        """Return what a response is worth: whether it is right, a number from 0 to 1, or a `Verdict`."""
        raise NotImplementedError(f"{type(self).__name__} must say what a response is worth: define `worth`")

    def draw_task(self) -> Task:
        """Draw one of the tasks."""
        tasks = self._tasks
        task = tasks(self.np_random) if callable(tasks) else tasks[int(self.np_random.integers(len(tasks)))]
        # Of its own: a function that sorts the task's options in place would sort those of all later episodes.
        return self.checked_task(deepcopy(task))

    def checked_task(self, fields: Task) -> Task:
        """Return a task as it is, once it is seen to have a question.

        Raises:
            ValueError: If it has none.
        """
        if not isinstance(fields, Mapping):
            raise ValueError(f"a task is a mapping with the field 'question', not {type(fields).__name__}")
        if not isinstance(fields.get("question"), str):
            raise ValueError(f"a task needs the field 'question', a text; this one has {sorted(fields)}")
        return dict(fields)

    def instruction(self) -> str:
        """Return how to answer."""
        return self.instructs

    def score(self, response: str, task: Task) -> Verdict:
        """Return the verdict on a response.

        Raises:
            ValueError: If what it is said to be worth is no number from 0 to 1.
        """
        return _verdict(self.worth(response, task))

    @property
    def _tasks(self) -> Sequence[Task] | DrawTask:
        # Taken from the class: a function in an attribute would otherwise be bound as a method.
        return type(self).tasks


def verifier(
    *, tasks: Sequence[Task] | DrawTask, instruction: str = TaskVerifier.instructs, **metadata: Any
) -> Callable[[ScoreFunction], type[TaskVerifier]]:
    """Make a verifier of a function from a response and its task to what the response is worth.

        @verifier(tasks=[{"question": "What is 6 * 7?", "answer": "42"}], instruction="Reply with the number.")
        def exact(response, task):
            return response.strip() == task["answer"]

    The name then is a class, which `roll-serve --env my_module:exact` serves as any other.

    Args:
        tasks: As of `TaskVerifier`.
        instruction: How the policy should answer.
        metadata: What else to say of it: `description`, `version`, `deterministic=False`.
    """

    def made(function: ScoreFunction) -> type[TaskVerifier]:
        description = (function.__doc__ or "").strip().partition("\n")[0]
        said = {"description": description} if description else {}
        return type(
            function.__name__,
            (TaskVerifier,),
            {
                "__doc__": function.__doc__,
                "__module__": function.__module__,
                "tasks": staticmethod(tasks) if callable(tasks) else tasks,
                "instructs": instruction,
                "metadata": TaskVerifier.metadata | said | metadata,
                "worth": lambda self, response, task: function(response, task),
            },
        )

    return made


def _verdict(worth: Score) -> Verdict:
    if isinstance(worth, Verdict):
        known = get_args(Outcome)
        if worth.outcome not in known:
            raise ValueError(f"the outcome of a verdict is one of {', '.join(known)}, not {worth.outcome!r}")
        _score(worth.score)
        return worth
    score = _score(worth)
    return Verdict(score, "correct" if score == 1.0 else "wrong" if score == 0.0 else "partial", "")


def _score(worth: object) -> float:
    """Return a score.

    Raises:
        ValueError: It is no number from 0 to 1.
    """
    if not isinstance(worth, bool | int | float | np.bool_ | np.integer | np.floating):
        raise ValueError(f"what a response is worth must be a number from 0 to 1, not {type(worth).__name__}")
    score = float(worth)
    if not (math.isfinite(score) and 0.0 <= score <= 1.0):
        raise ValueError(f"what a response is worth must be a number from 0 to 1, not {score}")
    return score
