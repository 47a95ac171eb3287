"""Verifiers of few lines: a function that scores, and the tasks that it scores replies to."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, Protocol, get_args

import numpy as np

from rollgym.envs.core.hooks import bridge_old_names
from rollgym.envs.core.kwargs import RenderMode
from rollgym.envs.verifiers.base import Outcome, Verdict, VerifierEnv

Task = Mapping[str, Any]
DrawTask = Callable[[np.random.Generator], Task]
Score = bool | float | Verdict
# The old names of the hooks.
_RENAMED = {"worth": "grade", "instructs": "answer_instruction"}


class ScoreFunction(Protocol):
    """What `verifier` makes a verifier of."""

    __name__: str
    __module__: str

    def __call__(self, response: str, task: Task, /) -> Score:
        """Return the score of a response, from 0 to 1, or whether it is right."""


class TaskVerifier(VerifierEnv):
    """Base of verifiers with a list of tasks: a subclass names the tasks and grades responses.

        class Exact(TaskVerifier):
            tasks = [{"question": "What is 6 * 7?", "answer": "42"}]

            def grade(self, response, task):
                return response.strip() == task["answer"]

    `roll-serve --env my_module:Exact` serves it. What `grade` raises is an error of the verifier, never a score of 0.

    Attributes:
        tasks: Mappings, each with the field `question`; or a function that draws one from a random generator, which is
            seeded with the episode.
        answer_instruction: How the policy should answer.
    """

    tasks: ClassVar[Sequence[Task] | DrawTask] = ()
    answer_instruction: ClassVar[str] = "Answer the question."

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Accept the old names of hooks."""
        super().__init_subclass__(**kwargs)
        bridge_old_names(cls, _RENAMED)

    def __init__(self, *, render_mode: RenderMode = None) -> None:
        super().__init__(render_mode=render_mode)
        if not callable(self._tasks) and not self._tasks:
            raise ValueError(f"{type(self).__name__} has no tasks: name them in its attribute `tasks`")

    @abstractmethod
    def grade(self, response: str, task: Task) -> Score:
        """Return whether a response is right, or its score from 0 to 1, or a `Verdict`.

        Args:
            response: What the policy said. It may be any text: empty, long, not ASCII.
            task: A copy of one of the `tasks`, or what a caller of `/v1/verify` gave in its place.
        """

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
        return self.answer_instruction

    def score(self, response: str, task: Task) -> Verdict:
        """Return the verdict on a response.

        Raises:
            ValueError: If `grade` returns anything but a boolean, a number from 0 to 1 or a `Verdict`.
        """
        return _verdict(self.grade(response, task))

    @property
    def _tasks(self) -> Sequence[Task] | DrawTask:
        # Taken from the class: a function in an attribute would otherwise be bound as a method.
        return type(self).tasks


bridge_old_names(TaskVerifier, _RENAMED)


def verifier(
    *, tasks: Sequence[Task] | DrawTask, instruction: str = TaskVerifier.answer_instruction, **metadata: Any
) -> Callable[[ScoreFunction], type[TaskVerifier]]:
    """Make a verifier of a function that grades a response to a task.

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
                "answer_instruction": instruction,
                "metadata": TaskVerifier.metadata | said | metadata,
                "grade": lambda self, response, task: function(response, task),
            },
        )

    return made


def _verdict(grade: Score) -> Verdict:
    if isinstance(grade, Verdict):
        known = get_args(Outcome)
        if grade.outcome not in known:
            raise ValueError(f"the outcome of a verdict is one of {', '.join(known)}, not {grade.outcome!r}")
        _score(grade.score)
        return grade
    score = _score(grade)
    return Verdict(score, "correct" if score == 1.0 else "wrong" if score == 0.0 else "partial", "")


def _score(grade: object) -> float:
    """Return a score.

    Raises:
        ValueError: It is not a number from 0 to 1.
    """
    if not isinstance(grade, bool | int | float | np.bool_ | np.integer | np.floating):
        raise ValueError(f"what a response is worth must be a number from 0 to 1, not {type(grade).__name__}")
    score = float(grade)
    if not (math.isfinite(score) and 0.0 <= score <= 1.0):
        raise ValueError(f"what a response is worth must be a number from 0 to 1, not {score}")
    return score
