"""The policies of an audit: random, blind, echoing, or the environment's own expert."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium import Space, spaces

from rollgym.clients.checks.tool_replies import ToolReplies
from rollgym.clients.checks.trace import RandomActions
from rollgym.clients.protocol.spaces import UnicodeText

_CALLS = 0.7
_READ = 20_000


class GiveUp(Exception):  # noqa: N818 - no error: the player leaves
    """Raised by a player that has no further action: its episode ends where it stands."""


Player = Callable[[Any, Mapping[str, Any]], Any]
"""Plays one episode: an action for each observation and info."""


@dataclass(frozen=True)
class AuditPolicy:
    """How episodes are played.

    Attributes:
        name: For people.
        begin: Gives the player of an episode, by its seed.
        options: The options of the reset.
    """

    name: str
    begin: Callable[[int], Player]
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ActionWording:
    """The form in which an environment reads actions from texts.

    Attributes:
        before: The text before the action.
        after: The text after it.
    """

    before: str = ""
    after: str = ""

    def write(self, action: Any) -> Any:
        """Return a text in this form, and anything else as it is."""
        return f"{self.before}{action}{self.after}" if isinstance(action, str) else action


WORDINGS = (
    ActionWording(),
    ActionWording("<answer>", "</answer>"),
    ActionWording("\\boxed{", "}"),
    ActionWording("<think></think><action>", "</action>"),
    ActionWording("<action>", "</action>"),
)
"""Forms that frameworks use; which one an environment reads is tried."""


def takes_text(space: Space[Any]) -> bool:
    """Whether the space takes texts as actions."""
    return isinstance(space, (UnicodeText, spaces.Text))


def listed_actions(info: Mapping[str, Any]) -> Sequence[Any]:
    """Return the actions that an info lists."""
    listed = info.get("available_actions")
    return listed if isinstance(listed, (list, tuple)) else ()


def random_policy(space: Space[Any], wording: ActionWording) -> AuditPolicy:
    """Return a random policy: over the listed actions, over calls of the tools, or else over the space.

    If any text is an action, it plays plausible texts.
    """

    def begin(seed: int) -> Player:
        draw = random.Random(seed)
        sampler = RandomActions(copy.deepcopy(space), seed)
        replies = ToolReplies({})

        def play(observation: Any, info: Mapping[str, Any]) -> Any:
            nonlocal replies
            if listed := listed_actions(info):
                return wording.write(draw.choice(listed))
            if "tools" in info:  # of a reset
                replies = ToolReplies(info)
            if replies.tools and draw.random() < _CALLS:
                reply = replies.draw(draw, _words(observation))
                if reply is not None and reply in space:
                    return reply
            if isinstance(space, UnicodeText):
                return wording.write(_plausible(draw, observation))
            return sampler.choose({})

        return play

    return AuditPolicy("random", begin)


def _words(observation: Any) -> list[str]:
    return re.findall(r"\w+", observation[:_READ]) if isinstance(observation, str) else []


def _plausible(draw: random.Random, observation: Any) -> str:
    words = _words(observation)
    kind = draw.random()
    if words and kind < 0.4:
        return draw.choice(words)
    return str(draw.randrange(100)) if kind < 0.8 else draw.choice(("A", "B", "C", "D", "yes", "no"))


def constant_policy(action: Any, name: str | None = None) -> AuditPolicy:
    """Return play that always does the same."""
    return AuditPolicy(name or f"always {_short(action)}", lambda _: lambda observation, info: action)


def script_policy(actions: Sequence[Any], name: str = "blind") -> AuditPolicy:
    """Return play of one sequence, whatever is seen."""

    def begin(_: int) -> Player:
        rest = iter(actions)

        def play(observation: Any, info: Mapping[str, Any]) -> Any:
            for action in rest:
                return action
            raise GiveUp

        return play

    return AuditPolicy(name, begin)


def echo_policy(space: Space[Any], read: Callable[[Any, Mapping[str, Any]], Any], name: str) -> AuditPolicy:
    """Return a policy that repeats what it reads as its action, and gives up if that is not in the space."""

    def play(observation: Any, info: Mapping[str, Any]) -> Any:
        action = read(observation, info)
        if action is None or action not in space:
            raise GiveUp
        return action

    return AuditPolicy(name, lambda _: play)


def expert_policy(wording: ActionWording) -> AuditPolicy:
    """Return the policy that plays the environment's expert."""

    def play(observation: Any, info: Mapping[str, Any]) -> Any:
        if "expert_action" not in info:
            raise GiveUp
        return wording.write(info["expert_action"])

    return AuditPolicy("expert", lambda _: play, {"expert": True})


def examples_policy(replies: Sequence[Any]) -> AuditPolicy:
    """Return play at random of the example replies that an environment declares."""

    def begin(seed: int) -> Player:
        draw = random.Random(seed)
        return lambda observation, info: draw.choice(replies)

    return AuditPolicy("example replies", begin)


def constants(
    space: Space[Any], listed: Sequence[Any], wording: ActionWording, examples: Sequence[Any], most: int = 12
) -> list[AuditPolicy]:
    """Return a policy for each action that is worth saying always.

    Args:
        space: The action space.
        listed: The actions that a reset's info lists.
        wording: How texts are written.
        examples: The example replies that the environment declares.
        most: Give no more.
    """
    if examples and not listed:
        return [constant_policy(reply) for reply in examples[:most]]
    if takes_text(space):
        texts = list(listed) if listed else ["0", "1", "A", "yes", "no", "I do not know."]
        chosen = [wording.write(text) for text in texts if isinstance(text, str)]
        return [constant_policy(text) for text in chosen[:most] if text in space]
    if isinstance(space, spaces.Discrete):
        first = int(space.start)
        return [constant_policy(action) for action in range(first, first + min(most, int(space.n)))]
    sampled = copy.deepcopy(space)
    sampled.seed(0)
    return [constant_policy(sampled.sample()) for _ in range(min(4, most))]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
