"""A verifier of rules: a task is a prompt and the rules of its response, which a program can check."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rollgym.envs.core.patterns import TooMuchWorkError
from rollgym.envs.verifiers.base import GeneratingVerifier, Verdict

_SAID = 80


class RuledVerifier(GeneratingVerifier):
    """Base of verifiers whose tasks are prompts with rules. What a response must be is in the task, and no answer."""

    @abstractmethod
    def check_rules(self, fields: Mapping[str, Any]) -> None:
        """Look at the rules of a task.

        Raises:
            ValueError: They are not known, or make no sense.
        """

    @abstractmethod
    def rate(self, response: str, task: Mapping[str, Any]) -> Verdict:
        """Hold every rule of a task against a response.

        Raises:
            ValueError: The task's rules are not known, or make no sense.
            TooMuchWorkError: A pattern of theirs takes too long.
        """

    def said(self, response: str) -> str:
        """Return the part of a response that is looked at."""
        return response

    def content(self, task: Mapping[str, Any]) -> str:
        """Return the prompt."""
        return self.prompt(task)

    def checked_task(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a task whose rules are known."""
        self.check_rules(fields)
        if not isinstance(fields.get("prompt"), str):
            raise ValueError("a task needs the field 'prompt': what the policy is asked")
        return dict(fields)

    def prompt(self, task: Mapping[str, Any]) -> str:
        """Return the prompt."""
        return str(task["prompt"])

    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        """Hold every rule of a task against a response."""
        try:
            verdict = self.rate(response, task)
        except ValueError as error:
            return Verdict(0.0, "error", str(error))
        except TooMuchWorkError as error:
            # What a response brings about by itself is not an error: a policy could choose to be played again.
            return Verdict(0.0, "timeout" if self._slow_by_itself(task) else "unparsable", str(error))
        if not self.said(response).strip():
            return Verdict(0.0, "unparsable", "the response is blank", verdict.metrics)
        return verdict

    def _slow_by_itself(self, task: Mapping[str, Any]) -> bool:
        """Whether the rules take too long, or make no sense, on the task's own prompt, which no policy wrote."""
        try:
            self.rate(str(task.get("prompt", "")), task)
        except (TooMuchWorkError, ValueError):
            return True
        return False


def one_of(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return a field of a task that is one of some words.

    Raises:
        ValueError: It is none of them.
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {str(value)[:_SAID]!r}")
    return str(value)
