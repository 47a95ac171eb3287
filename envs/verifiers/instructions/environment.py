"""InstructionFollowing-v0: instructions whose following can be checked, as in IFEval."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from rollgym.clients.replies.thinking import strip_thinking
from rollgym.envs.core.kwargs import OneOf, RenderMode
from rollgym.envs.core.splits import TaskSplit
from rollgym.envs.verifiers.base import Verdict
from rollgym.envs.verifiers.instructions.following import Followed, follow, read_constraints
from rollgym.envs.verifiers.instructions.prompts import draw_prompt
from rollgym.envs.verifiers.instructions.text import DetectorName, TokenizerName, text_tools
from rollgym.envs.verifiers.ruled import RuledVerifier, one_of

Mode = Literal["strict", "loose"]
Reward = Literal["all", "fraction"]

_MODES = ("strict", "loose")
_REWARDS = ("all", "fraction")
_MOST = 4


class InstructionFollowingEnv(RuledVerifier):
    """Instructions whose following can be checked: IFEval's 25, IFEvalG's 29 more, and RLVR-IFEval's naming.

    Thinking is not looked at. A task may say `mode` and `reward` for itself.

    Raises:
        ValueError: If an argument makes no sense, or a library is not installed.
    """

    metadata: dict[str, Any] = RuledVerifier.metadata | {
        "description": "Instructions whose following can be checked, such as a number of words or a title (IFEval).",
        "observation": "A prompt with its instructions.",
        "reward": "1 where all instructions are followed, else 0; their share with `reward: fraction`.",
        # Keywords are regular expressions that the author of the task wrote.
        "inline": False,
        "metrics": {
            "score": "last",
            "prompt_strict": "last",
            "prompt_loose": "last",
            "instruction_strict": "last",
            "instruction_loose": "last",
        },
        "example_reply": (
            "Keep the beans in a closed jar, and the smell stays in them.\n\n***\n\n"
            "Grind them beside an open window, so that the room is fresh in the evening."
        ),
        "baselines": {"random": 0, "constant action": 0.02},
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
        split: TaskSplit = None,
        render_mode: RenderMode = None,
    ) -> None:
        super().__init__(split=split, render_mode=render_mode)
        if least > most:
            raise ValueError(f"least must be at most most, not {least} and {most}")
        self._mode: str = mode
        self._reward: str = reward
        self._least = least
        self._most = most
        self._tools = text_tools(tokenizer, language_detector)

    def generate_task(self) -> dict[str, Any]:
        """Draw a prompt with its instructions."""
        return draw_prompt(self.np_random, self._least, self._most)

    def check_rules(self, fields: Mapping[str, Any]) -> None:
        """Look at the instructions, and at what is paid for them."""
        read_constraints(fields)
        self._wanted(fields)

    def instruction(self) -> str:
        """Return how to answer."""
        return (
            "Write what the prompt asks for, and follow each of its instructions to the letter. A program checks your "
            "whole response, so write nothing but the response itself."
        )

    def said(self, response: str) -> str:
        """Return a response without what was only thought.

        The blank lines behind thoughts are the template's: with them, no first paragraph would be the first.
        """
        said = strip_thinking(response)
        return said if said == response else said.lstrip()

    def rate(self, response: str, task: Mapping[str, Any]) -> Verdict:
        """Check every instruction of a task; the metrics are IFEval's four accuracies."""
        mode, reward = self._wanted(task)
        followed = follow(self.said(response), read_constraints(task), self._tools)
        missed = [each.name for each in followed if not (each.strict if mode == "strict" else each.loose)]
        kept = len(followed) - len(missed)
        detail = f"{kept} of {len(followed)} instructions followed"
        if missed:
            detail += f"; not {', '.join(missed)}"
        metrics = _accuracies(followed)
        if not missed:
            return Verdict(1.0, "correct", detail, metrics)
        if reward == "all" or not kept:
            return Verdict(0.0, "wrong", detail, metrics)
        return Verdict(kept / len(followed), "partial", detail, metrics)

    def _wanted(self, task: Mapping[str, Any]) -> tuple[str, str]:
        return (
            one_of("mode", task.get("mode", self._mode), _MODES),
            one_of("reward", task.get("reward", self._reward), _REWARDS),
        )


def _accuracies(followed: Sequence[Followed]) -> dict[str, float]:
    """Return IFEval's accuracies of one response: of the prompt and of its instructions, strict and loose."""
    strict = [each.strict for each in followed]
    loose = [each.loose for each in followed]
    return {
        "prompt_strict": float(all(strict)),
        "prompt_loose": float(all(loose)),
        "instruction_strict": sum(strict) / len(strict),
        "instruction_loose": sum(loose) / len(loose),
    }
