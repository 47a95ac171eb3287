"""Profiles: how a text environment is shown and how replies are read, as each framework does it.

The core of an environment knows none of this. Sources: RAGEN, ROLL, verl-agent and GEM as they run; `native` is ours.
All profiles agree in one rule, even for a framework that differs: text in think tags is never an action.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from rollgym.clients.replies.marks import ANSWER_WITHIN, boxes, tagged
from rollgym.clients.replies.thinking import has_thought, strip_thinking

_SPECIAL = re.compile(r"<\|[^|<>]*\|>")
_QUOTES = "\"'`.“”‘’ \t\r\n"
SEPARATOR = "||"
_MARKS = {
    "answer": ("<answer>", "</answer>"),
    "action": ("<action>", "</action>"),
    "boxed": ("\\boxed{", "}"),
}
_NO_THOUGHT = "<think></think>"


@dataclass(frozen=True, slots=True)
class Profile:
    """How one framework talks with a game.

    Attributes:
        name: The framework.
        mark: The marks around the action: `<answer>`, `<action>` or a box.
        which: The mark that counts if there are several.
        bare: Whether a reply that is nothing but an action counts too.
        needs_thinking: Whether a reply without thinking is invalid; its opening tag may stand in the prompt.
        inside: Whether the mark must hold exactly the action's name, or only contain it.
        default_penalty: Added to the reward of a turn with an unreadable reply, unless the environment says otherwise.
        invalid_costs_step: Whether such a turn counts as a step of the environment.
        invalid_note: Line before the observation after such a turn.
        template: Observation, with `{board}`, `{actions}` and `{left}` (steps that are left).
        legend: Name of the symbols that boards are drawn with, if an environment has several.
    """

    name: str
    mark: Literal["answer", "action", "boxed"]
    which: Literal["first", "last"]
    bare: bool = False
    needs_thinking: bool = False
    inside: Literal["exact", "contains"] = "exact"
    default_penalty: float = 0.0
    invalid_costs_step: bool = True
    invalid_note: str = "Invalid action."
    template: str = "{board}"
    legend: str = "ragen"


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            Profile("native", "answer", "last", bare=True, legend="xsb"),
            Profile(
                "ragen",
                "answer",
                "first",
                default_penalty=-0.1,
                invalid_costs_step=False,
                invalid_note="No valid action provided previously. Environment state remains the same. "
                "Please try again.",
                template="State:\n{board}\nYou have {left} actions left. Your available actions are: {actions}.",
            ),
            Profile(
                "roll",
                "answer",
                "first",
                default_penalty=-0.1,
                template="{board}\nActions left: {left}. Choose one of: {actions}.",
            ),
            Profile(
                "verl-agent",
                "action",
                "first",
                needs_thinking=True,
                inside="contains",
                default_penalty=-0.1,
                invalid_costs_step=False,
                template="Current observation:\n{board}\nAdmissible actions: {actions}.",
            ),
            Profile(
                "gem",
                "boxed",
                "last",
                default_penalty=-0.1,
                template="{board}\nAnswer with \\boxed{{ACTION}}, one of: {actions}.",
            ),
        )
    }
)


def profile_named(name: str) -> Profile:
    """Return a profile.

    Raises:
        ValueError: If the name is unknown.
    """
    if name not in PROFILES:
        raise ValueError(f"profile must be one of {', '.join(PROFILES)}, not {name!r}")
    return PROFILES[name]


def said_actions(reply: str, profile: Profile, limit: int = 1) -> list[str]:
    """Return the texts in the places of actions under a profile, verbatim; empty if there are none.

    Args:
        reply: The policy's reply.
        profile: The rules for reading it.
        limit: Actions that one turn may take, separated by `||`; those beyond it are left out.
    """
    if profile.needs_thinking and not has_thought(reply):
        return []
    said = strip_thinking(reply)
    if "<|" in said:
        said = _SPECIAL.sub("", said)
    marked = _marked(said[-ANSWER_WITHIN:], profile)
    if marked:
        text = marked[0 if profile.which == "first" else -1]
    elif profile.bare and len(said) <= ANSWER_WITHIN:
        text = said
    else:
        return []
    return text.split(SEPARATOR)[:limit] if limit > 1 else [text]


def marks_of(profile: Profile) -> tuple[str, str]:
    """Return what a policy has to write before and after an action, so that it is read; both empty if nothing."""
    if profile.bare:
        return "", ""
    before, after = _MARKS[profile.mark]
    return _NO_THOUGHT * profile.needs_thinking + before, after


def _marked(said: str, profile: Profile) -> list[str]:
    if profile.mark == "boxed":
        return [box.content for box in boxes(said)[0]]
    return tagged(said, profile.mark)


def reply_format(profile: Profile, actions: str, example: str, limit: int = 1) -> str:
    """Return the instruction on how a policy must answer.

    Args:
        profile: The rules for reading replies.
        actions: Description of the actions.
        example: One of them.
        limit: Actions that one turn may take.
    """
    before, after = _MARKS[profile.mark]
    text = f"Actions: {actions}. "
    if profile.needs_thinking:
        text += "Think first inside <think></think>. "
    if limit > 1:
        text += f"You may give up to {limit} actions, separated by {SEPARATOR}. "
    return text + f"Reply with the action in this form: {before}{example}{after}"


def named_action(text: str, profile: Profile, names: Mapping[str, int]) -> int | None:
    """Return the action that a text names, or None.

    Args:
        text: The text in the place of an action.
        profile: The rules for reading it.
        names: Actions by lower-case name.
    """
    word = bare_word(text)
    if profile.inside == "exact":
        return names.get(word)
    return next((action for name, action in names.items() if name in word), None)


def bare_word(text: str) -> str:
    """Return what was said in lower case, without the quotes and blanks around it."""
    return text.strip(_QUOTES).lower()


def name_table(names: Sequence[str]) -> dict[str, int]:
    """Return actions by lower-case name."""
    return {name.lower(): action for action, name in enumerate(names)}
