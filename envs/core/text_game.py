"""Base of the games that a language model plays: text in, text out, one turn after another. Knows profiles, no game."""

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, NamedTuple, TypedDict, TypeVar, Unpack

import gymnasium
from gymnasium import Space
from pydantic import Field

from rollgym.clients.protocol.spaces import UnicodeText
from rollgym.envs.core.kwargs import DeclaredKwargs, OneOf, RenderMode
from rollgym.envs.core.profiles import (
    PROFILES,
    name_table,
    named_action,
    profile_named,
    reply_format,
    said_actions,
)
from rollgym.envs.core.reset_options import checked_options

Action = TypeVar("Action")

StepLimit = Annotated[int, Field(ge=1, description="Steps after which an episode is truncated.")]
ProfileName = Annotated[
    str, OneOf(*PROFILES), Field(description="How observations are shown and replies are read.")
]
FormatPenalty = Annotated[
    float | None,
    Field(
        description="Added to the reward of a reply that names no possible action; null: the profile's own."
    ),
]
ActionsPerTurn = Annotated[
    int, Field(ge=1, le=100, description="Actions that one reply may name, separated by `||`.")
]

_NUMBERS = re.compile(r"\d{1,9}(?:[\s,;]+\d{1,9}){0,9}", re.ASCII)


class GameKwargs(TypedDict, total=False):
    """The kwargs that all games have beside `max_episode_steps`, as `TextGame` declares them."""

    profile: str
    format_penalty: float | None
    max_actions_per_turn: int
    render_mode: str | None


class Move(NamedTuple):
    """What one action did; `truncated` is for games with a limit of their own."""

    reward: float
    terminated: bool
    success: bool
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a text is no action that could be taken now; empty where there is nothing to say but that."""

    reason: str = ""


class TextGame(DeclaredKwargs, gymnasium.Env[Any, str], Generic[Action]):
    """A game that a language model plays. It tells the base `form`, what actions look like, and an `example` of one.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = {
        "reset_options": ["expert"],
        "observation": "The board as text, framed as the `profile` says.",
        "actions": "Text that names one action, in the marks that the `profile` asks for.",
        "reward": "1 when it is solved, else 0; `format_penalty` for a reply without a possible action.",
        "render_modes": ["ansi"],
        "render_fps": 4,
        "kind": "episodic",
        "inline": True,
        "deterministic": True,
        "forkable": True,
        "expert": True,
        "metrics": {"steps": "last", "invalid_replies": "last"},
        "version": "0",
    }

    def __init__(
        self,
        form: str,
        example: str,
        *,
        max_episode_steps: StepLimit,
        profile: ProfileName = "native",
        format_penalty: FormatPenalty = None,
        max_actions_per_turn: ActionsPerTurn = 1,
        render_mode: RenderMode = None,
    ) -> None:
        self.action_space = UnicodeText()
        self.observation_space: Space[Any] = UnicodeText()
        self.render_mode = render_mode
        self.profile = profile_named(profile)
        self._form = form
        self._penalty = self.profile.default_penalty if format_penalty is None else float(format_penalty)
        self._limit = max_episode_steps
        self._per_turn = max_actions_per_turn
        self._reply_format = reply_format(self.profile, form, example, max_actions_per_turn)
        self._expert = False
        self._steps = 0
        self._invalid_turns = 0
        self._last_action: Action | None = None
        # Where profiles show nothing but the board, no formatting is needed on the way.
        self._plain = self.profile.template == "{board}"

    # -- what a game implements ------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, options: Mapping[str, Any]) -> None:
        """Set up an episode from `self.np_random` and the reset's options."""

    @abstractmethod
    def _read(self, text: str) -> Action | Refusal:
        """Return the action that a text names, or why it cannot be taken."""

    @abstractmethod
    def _move(self, action: Action) -> Move:
        """Take an action that was read."""

    @abstractmethod
    def _board(self) -> str:
        """Draw the board for the policy."""

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """Return what `info` says of the state: `state`, `anchor` and the game's own."""

    @abstractmethod
    def _rules(self) -> str:
        """Return the game's instruction, without the reply format."""

    def _expert_reply(self) -> str:
        """Return what the expert would say; called only where the metadata promise one."""
        raise NotImplementedError

    def _idle(self) -> float:
        """Return the reward of a step on which nothing was done."""
        return 0.0

    def _available(self) -> list[str] | None:
        """Return all actions that can be taken now; None where they are not listed."""
        return None

    def _optimal_steps(self) -> int | None:
        """Return the least number of steps from here; None if it is not known."""
        return None

    def _written(self, action: Action) -> str:
        """Return an action as it is said."""
        return str(action)

    def _metrics(self) -> dict[str, float]:
        """Return the game's own metrics; its metadata say how each becomes one of the episode."""
        return {}

    # -- Gymnasium -------------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. All games take the option `expert`; each has its own beside it."""
        super().reset(seed=seed)
        given = checked_options(self.metadata["reset_options"], options)
        self._expert = given.get("expert", False)
        if self._expert and not self.metadata["expert"]:
            raise ValueError(f"{type(self).__name__} has no expert: reset it without the option 'expert'")
        self._steps = 0
        self._invalid_turns = 0
        self._last_action = None
        self._begin(given)
        info = self._info(success=False, valid=True, reward=0.0, penalty=0.0)
        info["instruction"] = f"{self._rules()} {self._reply_format}"
        info["optimal_steps"] = self._optimal_steps()
        return self._observation(), info

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take the actions that a reply names, or none if it names none that can be taken."""
        reward, terminated, success, truncated = 0.0, False, False, False
        taken, refusal = False, None
        for text in self._said(action):
            chosen = self._read(text)
            if isinstance(chosen, Refusal):
                refusal = refusal or chosen
                continue
            taken = True
            self._steps += 1
            self._last_action = chosen
            gained, terminated, success, truncated = self._move(chosen)
            reward += gained
            if terminated or truncated or self._steps >= self._limit:
                break
        if not taken:
            return self._invalid_turn(refusal or Refusal())
        truncated = truncated or (not terminated and self._steps >= self._limit)
        info = self._info(success=success, valid=True, reward=reward, penalty=0.0)
        return self._observation(), reward, terminated, truncated, info

    def render(self) -> Any:
        """Return the board as text."""
        if self.render_mode != "ansi":
            return None
        title = "" if self._last_action is None else f"  ({self._written(self._last_action)})"
        return f"{title}\n{self._board()}\n"

    def _said(self, reply: str) -> Sequence[str]:
        """Return the texts of a reply that stand where actions are wanted."""
        return said_actions(reply, self.profile, self._per_turn)

    def _invalid_turn(self, refusal: Refusal) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = 0.0
        self._invalid_turns += 1
        self._last_action = None
        # A reply that costs no step must still not be free for ever: turns beyond the limit are cut as well.
        if self.profile.invalid_costs_step:
            self._steps += 1
            reward = self._idle()
        spent = self._steps if self.profile.invalid_costs_step else self._steps + self._invalid_turns
        truncated = spent >= self._limit
        info = self._info(success=False, valid=False, reward=reward, penalty=self._penalty)
        note = " ".join(filter(None, (self.profile.invalid_note, refusal.reason)))
        return self._noted(note, info), reward + self._penalty, False, truncated, info

    def _observation(self) -> Any:
        board = self._board()
        return board if self._plain else self._framed(board)

    def _noted(self, note: str, info: dict[str, Any]) -> Any:
        """Return the observation with a note on the last reply."""
        return f"{note}\n{self._observation()}"

    def _framed(self, board: str) -> str:
        """Return what the profile says around a board."""
        left = max(0, self._limit - self._steps)
        return self.profile.template.format(board=board, left=left, actions=self._form)

    def _info(self, *, success: bool, valid: bool, reward: float, penalty: float) -> dict[str, Any]:
        info = {
            "success": success,
            "action_is_valid": valid,
            "format_penalty": penalty,
            "env_reward": reward,
            "metrics": {"steps": self._steps, "invalid_replies": self._invalid_turns, **self._metrics()},
            **self._facts(),
        }
        if (available := self._available()) is not None:
            info["available_actions"] = available
        if self._expert:
            info["expert_action"] = self._expert_reply()
        return info


class NamedGame(TextGame[int]):
    """A game whose `actions` are a few names, always the same."""

    def __init__(
        self, actions: tuple[str, ...], *, max_episode_steps: int, **common: Unpack[GameKwargs]
    ) -> None:
        super().__init__(", ".join(actions), actions[0], max_episode_steps=max_episode_steps, **common)
        self._actions = actions
        self._names = name_table(actions)
        # A reply that is nothing but a name needs no search for marks.
        self._bare_names = self.profile.bare and self._per_turn == 1

    def _best_action(self) -> int:
        """Return the expert's action; called only where the metadata promise one."""
        raise NotImplementedError

    def _said(self, reply: str) -> Sequence[str]:
        if self._bare_names and reply.lower() in self._names:
            return (reply,)
        return super()._said(reply)

    def _read(self, text: str) -> int | Refusal:
        action = named_action(text, self.profile, self._names)
        return Refusal() if action is None else action

    def _available(self) -> list[str] | None:
        return list(self._actions)

    def _written(self, action: int) -> str:
        return self._actions[action]

    def _expert_reply(self) -> str:
        return self._actions[self._best_action()]


def read_numbers(text: str, count: int) -> tuple[int, ...] | None:
    """Return the whole numbers that a text consists of, as `2 3 4` or `(2, 3, 4)`; None if they are not `count`."""
    plain = text.strip("\"'`“”‘’()[] \t\r\n")
    numbers = re.findall(r"\d+", plain) if _NUMBERS.fullmatch(plain) else []
    return tuple(map(int, numbers)) if len(numbers) == count else None
