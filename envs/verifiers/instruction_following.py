"""InstructionFollowing-v0: instructions whose following can be checked, as in IFEval."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from envs.kwargs import OneOf, RenderMode
from envs.replies import spoken
from envs.splits import SPLIT, checked_split, split_of_text
from envs.verifiers.base import Verdict, VerifierEnv
from envs.verifiers.instructions.following import Followed, follow, read_constraints
from envs.verifiers.instructions.prompts import draw_prompt
from envs.verifiers.instructions.tools import DetectorName, TokenizerName, text_tools
from envs.verifiers.patterns import TooMuchWorkError

Mode = Literal["strict", "loose"]
Reward = Literal["all", "fraction"]

_MODES = ("strict", "loose")
_REWARDS = ("all", "fraction")
_MOST = 4
_TRIES = 10_000
_SAID = 80


class InstructionFollowingEnv(VerifierEnv):
    """Instructions whose following can be checked: IFEval's 25, IFEvalG's 29 more, and RLVR-IFEval's naming.

    Thinking is not looked at. A task may say `mode` and `reward` for itself.

    Raises:
        ValueError: If an argument makes no sense, or a library is not installed.
    """

    metadata: dict[str, Any] = VerifierEnv.metadata | {
        "description": "Instructions whose following can be checked, such as a number of words or a title (IFEval).",
        "observation": "A prompt with its instructions.",
        "reward": "1 where all instructions are followed, else 0; their share with `reward: fraction`.",
        # Keywords are regular expressions of whoever wrote the task.
        "inline": False,
        "metrics": {
            "score": "last",
            "prompt_strict": "last",
            "prompt_loose": "last",
            "instruction_strict": "last",
            "instruction_loose": "last",
        },
    }

    def __init__(
        self,
        *,
        mode: Annotated[
            Mode,
            OneOf(*_MODES),
            Field(
                description=(
                    "`strict` looks at the response as it is; `loose` also without its first line, last "
                    "line and asterisks."
                )
            ),
        ] = "strict",
        reward: Annotated[
            Reward,
            OneOf(*_REWARDS),
            Field(
                description="`all` pays for following all instructions; `fraction`, for the share of them."
            ),
        ] = "all",
        least: Annotated[
            int, Field(ge=1, le=_MOST, description="Instructions in a drawn prompt at least.")
        ] = 1,
        most: Annotated[
            int, Field(ge=1, le=_MOST, description="Instructions in a drawn prompt at most.")
        ] = 3,
        tokenizer: Annotated[
            TokenizerName,
            OneOf("builtin", "nltk"),
            Field(description="`builtin`, or `nltk` for IFEval's own sentences and words."),
        ] = "builtin",
        language_detector: Annotated[
            DetectorName,
            OneOf("builtin", "langdetect"),
            Field(description="`builtin`, or `langdetect` for IFEval's own."),
        ] = "builtin",
        split: Annotated[
            str | None, SPLIT, Field(description="Only prompts of this split, by content.")
        ] = None,
        render_mode: RenderMode = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        if least > most:
            raise ValueError(f"least must be at most most, not {least} and {most}")
        self._mode: str = mode
        self._reward: str = reward
        self._least = least
        self._most = most
        self._tools = text_tools(tokenizer, language_detector)
        self._split = checked_split(split)

    def draw_task(self) -> dict[str, Any]:
        """Draw a prompt of the wanted split with its instructions."""
        for _ in range(_TRIES):
            task = draw_prompt(self.np_random, self._least, self._most)
            if self._split is None or split_of_text(task["prompt"]) == self._split:
                return task
        raise ValueError(f"no prompt of split {self._split} in {_TRIES} tries")

    def checked_task(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a task whose instructions are known."""
        read_constraints(fields)
        self._wanted(fields)
        if not isinstance(fields.get("prompt"), str):
            raise ValueError("a task needs the field 'prompt': what the policy is asked")
        return dict(fields)

    def prompt(self, task: Mapping[str, Any]) -> str:
        """Return the prompt."""
        return str(task["prompt"])

    def instruction(self) -> str:
        """Return how to answer."""
        return (
            "Write what the prompt asks for, and follow each of its instructions to the letter. A program checks your "
            "whole response, so write nothing but the response itself."
        )

    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        """Check every instruction of a task."""
        try:
            mode, reward = self._wanted(task)
            followed = self.followed(response, task)
        except ValueError as error:
            return Verdict(0.0, "error", str(error))
        except TooMuchWorkError as error:
            return Verdict(0.0, "timeout", str(error))
        if not spoken(response).strip():
            return Verdict(0.0, "unparsable", "the response is blank")
        missed = [each.name for each in followed if not (each.strict if mode == "strict" else each.loose)]
        kept = len(followed) - len(missed)
        detail = f"{kept} of {len(followed)} instructions followed"
        if missed:
            detail += f"; not {', '.join(missed)}"
        if not missed:
            return Verdict(1.0, "correct", detail)
        if reward == "all" or not kept:
            return Verdict(0.0, "wrong", detail)
        return Verdict(kept / len(followed), "partial", detail)

    def followed(self, response: str, task: Mapping[str, Any]) -> list[Followed]:
        """Return which instructions a response follows, strictly and loosely.

        Raises:
            ValueError: The task's instructions are not known.
            TooMuchWorkError: A keyword is a regular expression that takes too long.
        """
        return follow(spoken(response), read_constraints(task), self._tools)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score the response; the metrics have IFEval's four accuracies, too."""
        observation, reward, terminated, truncated, info = super().step(action)
        if info["outcome"] not in ("error", "timeout"):
            info["metrics"] |= accuracies(self.followed(action, self._task))
        return observation, reward, terminated, truncated, info

    def _wanted(self, task: Mapping[str, Any]) -> tuple[str, str]:
        return (
            _one_of("mode", task.get("mode", self._mode), _MODES),
            _one_of("reward", task.get("reward", self._reward), _REWARDS),
        )


def accuracies(followed: Sequence[Followed]) -> dict[str, float]:
    """Return IFEval's accuracies of one response: of the prompt and of its instructions, strict and loose."""
    strict = [each.strict for each in followed]
    loose = [each.loose for each in followed]
    return {
        "prompt_strict": float(all(strict)),
        "prompt_loose": float(all(loose)),
        "instruction_strict": sum(strict) / len(strict),
        "instruction_loose": sum(loose) / len(loose),
    }


def _one_of(name: str, value: Any, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {str(value)[:_SAID]!r}")
    return str(value)
