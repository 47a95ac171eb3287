"""Composite-v0: a verifier made of others, by weights and gates."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from rollgym.envs.core.kwargs import OPERATOR, RenderMode
from rollgym.envs.verifiers.base import Outcome, Verdict, VerifierEnv

_FULL = 1.0 - 1e-9
_DEFAULT: tuple[Mapping[str, Any], ...] = ({"verifier": "Arithmetic-v0"},)


@dataclass(frozen=True, slots=True)
class _Part:
    """One verifier of the composition.

    Attributes:
        name: Its id.
        verifier: It.
        weight: Its share of the score.
        gate: The score it must give for anything to be paid; None if it is not a gate.
        task: Fields that every task has for it.
    """

    name: str
    verifier: VerifierEnv
    weight: float
    gate: float | None
    task: Mapping[str, Any]


_PART: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["verifier"],
    "properties": {
        "verifier": {"type": "string"},
        "kwargs": {"type": "object"},
        "weight": {"type": "number", "minimum": 0},
        "gate": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "task": {"type": "object"},
    },
}
"""JSON Schema of a part."""


class CompositeEnv(VerifierEnv):
    """Built-in verifiers together: a weighted mean of their scores, and gates that must be passed first.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = VerifierEnv.metadata | {
        "description": "Other verifiers together: weighted means of scores, and gates.",
        "observation": "The question of the part that draws the tasks.",
        "reward": "The weighted mean of the parts' scores; 0 where a gate is not passed.",
        # As slow as the slowest of its parts.
        "inline": False,
        "example_reply": "<answer>{answer}</answer>",
        "baselines": {"random": 0.01, "constant action": 0, "echo": 0.02, "blind": 0},
    }

    def __init__(
        self,
        *,
        parts: Annotated[
            Sequence[Mapping[str, Any]],
            Field(
                min_length=1,
                max_length=16,
                json_schema_extra={"items": _PART},
                description=(
                    "Each has a `verifier` (a built-in id), and may have `kwargs` of it, a `weight` (1 "
                    "without; 0 for a gate), a `gate` (the least score it must give, or nothing is paid) "
                    "and `task` (fields that every task has for it). Gates are asked first, in their "
                    "order, and the first that is not passed decides."
                ),
            ),
        ] = _DEFAULT,
        operator_parts: Annotated[
            Sequence[Mapping[str, Any]] | None,
            OPERATOR,
            Field(
                description="In place of `parts`, of an operator: only here may `kwargs` be those that operators set."
            ),
        ] = None,
        tasks: Annotated[
            int | None,
            Field(
                ge=0,
                description="Which part draws and shows the tasks, by its place; the first that is no gate without.",
            ),
        ] = None,
        render_mode: RenderMode = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        trusted = operator_parts is not None
        self._parts = tuple(_part(each, trusted) for each in operator_parts or parts)
        self._weight = sum(part.weight for part in self._parts)
        if not self._weight > 0:
            raise ValueError("parts needs at least one with a weight above 0: gates alone pay nothing")
        if not math.isfinite(self._weight):
            raise ValueError("the weights of parts must have a finite sum")
        if tasks is None:
            tasks = next((index for index, part in enumerate(self._parts) if part.gate is None), 0)
        if tasks >= len(self._parts):
            raise ValueError(f"tasks must be the place of a part, 0 to {len(self._parts) - 1}, not {tasks}")
        self._source = self._parts[tasks].verifier

    def draw_task(self) -> Mapping[str, Any]:
        """Have one part draw a task, with this environment's generator."""
        self._source.np_random = self.np_random
        return self._source.draw_task()

    def checked_task(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the task that every part accepts."""
        for part in self._parts:
            part.verifier.checked_task({**fields, **part.task})
        return self._source.checked_task(fields)

    def prompt(self, task: Mapping[str, Any]) -> str:
        """Return what the part that draws the tasks asks."""
        return self._source.prompt(task)

    def instruction(self) -> str:
        """Return how to answer, as the parts say it."""
        return " ".join(dict.fromkeys(part.verifier.instruction() for part in self._parts))

    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        """Ask the gates, then weigh the scores of the parts."""
        verdicts: dict[int, Verdict] = {}
        for index, part in sorted(enumerate(self._parts), key=lambda each: each[1].gate is None):
            verdict = verdicts[index] = part.verifier.score(response, {**task, **part.task})
            if verdict.outcome in ("timeout", "error"):
                return Verdict(0.0, verdict.outcome, f"{part.name}: {verdict.detail}")
            if part.gate is not None and verdict.score < part.gate - 1e-9:
                outcome: Outcome = "unparsable" if verdict.outcome == "unparsable" else "wrong"
                return Verdict(0.0, outcome, f"gate {part.name}: {verdict.detail}")
        score = (
            sum(part.weight * verdicts[index].score for index, part in enumerate(self._parts)) / self._weight
        )
        detail = "; ".join(
            f"{part.name} {verdicts[index].score:g} ({verdicts[index].detail})"
            for index, part in enumerate(self._parts)
        )
        if score >= _FULL:
            return Verdict(1.0, "correct", detail)
        if score > 0:
            return Verdict(score, "partial", detail)
        unread = all(verdict.outcome == "unparsable" for verdict in verdicts.values())
        return Verdict(0.0, "unparsable" if unread else "wrong", detail)

    def close(self) -> None:
        """Close the parts."""
        for part in self._parts:
            part.verifier.close()


def _part(given: Mapping[str, Any], trusted: bool) -> _Part:
    unknown = set(given) - {"verifier", "kwargs", "weight", "gate", "task"}
    if unknown or "verifier" not in given:
        raise ValueError(
            f"a part has a 'verifier' and may have 'kwargs', 'weight', 'gate' and 'task'; this one is {dict(given)!r}"
        )
    gate = given.get("gate")
    weight = float(given.get("weight", 1.0 if gate is None else 0.0))
    if weight < 0 or (gate is not None and not 0 < gate <= 1):
        raise ValueError(f"the weight of {given['verifier']} must not be negative, and its gate be in (0, 1]")
    return _Part(
        given["verifier"],
        _verifier(given["verifier"], given.get("kwargs", {}), trusted),
        weight,
        gate,
        given.get("task", {}),
    )


def _verifier(name: str, kwargs: Mapping[str, Any], trusted: bool) -> VerifierEnv:
    # The registry lists this module, too, by its name.
    from rollgym.envs.registry import builtin_environments

    built_in = builtin_environments()
    verifier = built_in[name].load() if name in built_in else None
    if not (isinstance(verifier, type) and issubclass(verifier, VerifierEnv)):
        known = ", ".join(built_in)
        raise ValueError(f"{name!r} is no built-in verifier; the built-in environments are {known}")
    reserved = verifier.operator_kwargs & kwargs.keys()
    if reserved and not trusted:
        raise ValueError(
            f"{', '.join(sorted(reserved))} of {name} is for operators: name it in operator_parts"
        )
    try:
        found: VerifierEnv = verifier(**kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"kwargs of {name}: {error}") from error
    return found
