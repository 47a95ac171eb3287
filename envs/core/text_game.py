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
from rollgym.envs.core.hooks import bridge_old_names, checked_options, complete_metadata, overrides
from rollgym.envs.core.kwargs import DeclaredKwargs, OneOf, RenderMode
from rollgym.envs.core.profiles import (
    PROFILES,
    name_table,
    named_action,
    profile_named,
    reply_format,
    said_actions,
)

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

# The old names of the hooks.
_RENAMED = {
    "_begin": "start_episode",
    "_read": "parse_action",
    "_move": "apply_action",
    "_board": "draw_board",
    "_facts": "state_info",
    "_rules": "describe_rules",
    "_expert_reply": "expert_reply",
    "_best_action": "expert_action",
    "_idle": "idle_reward",
    "_available": "available_actions",
    "_optimal_steps": "optimal_steps",
    "_written": "describe_action",
    "_metrics": "episode_metrics",
    "_picture": "draw_picture",
    "_observe_pictures": "observe_pictures",
    "_require_fitting": "require_fitting",
}
_NUMBERS = re.compile(r"\d{1,9}(?:[\s,;]+\d{1,9}){0,9}", re.ASCII)


class GameKwargs(TypedDict, total=False):
    """The kwargs that all games have beside `max_episode_steps`, as `TextGame` declares them."""

    profile: str
    format_penalty: float | None
    max_actions_per_turn: int
    render_mode: str | None


class Move(NamedTuple):
    """The result of one action.

    Attributes:
        reward: Reward of the action.
        terminated: Whether the game is over.
        success: Whether it is solved.
        truncated: Whether a limit of the game's own was reached; the base class counts `max_episode_steps`.
    """

    reward: float
    terminated: bool
    success: bool
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a text names no possible action.

    Attributes:
        reason: A sentence for the policy; may be empty.
    """

    reason: str = ""


class TextGame(DeclaredKwargs, gymnasium.Env[Any, str], Generic[Action]):
    """A game that a language model plays: text in, text out.

    A subclass passes `form` (what actions look like) and an `example` of one to the constructor, and overrides the
    hooks `start_episode`, `parse_action`, `apply_action`, `draw_board`, `state_info` and `describe_rules`. The other
    hooks are optional.

        class Guess(TextGame[int]):
            metadata = TextGame.metadata | {"description": "Guess a digit.", "max_episode_steps": 5}

            def __init__(self, *, max_episode_steps: int = 5, render_mode: str | None = None) -> None:
                super().__init__("a digit", "7", max_episode_steps=max_episode_steps, render_mode=render_mode)

            def start_episode(self, options):
                self.secret, self.guesses = int(self.np_random.integers(10)), []

            def parse_action(self, text):
                return int(text) if text.isdecimal() and len(text) == 1 else Refusal("Reply with one digit.")

            def apply_action(self, action):
                self.guesses.append(action)
                found = action == self.secret
                return Move(float(found), terminated=found, success=found)

            def draw_board(self):
                return f"Guesses so far: {self.guesses}"

            def state_info(self):
                return {"state": {"guesses": self.guesses}, "anchor": str(sorted(self.guesses))}

            def describe_rules(self):
                return "Find the secret digit."

    What a subclass's `metadata` leave out is taken from the base class's. `metadata["expert"]` says by itself whether
    `expert_reply` is overridden.

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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Accept the old names of hooks, and complete the metadata."""
        super().__init_subclass__(**kwargs)
        bridge_old_names(cls, _RENAMED)
        complete_metadata(cls, expert=overrides(cls, {"expert_reply", "expert_action"}, __name__))

    # -- hooks -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def start_episode(self, options: Mapping[str, Any]) -> None:
        """Set up an episode.

        Draw whatever is random from `self.np_random`, which the reset has seeded.

        Args:
            options: The options of the reset, each one of `metadata["reset_options"]`.

        Raises:
            ValueError: If an option makes no sense; the caller gets the message.
        """

    @abstractmethod
    def parse_action(self, text: str) -> Action | Refusal:
        """Return the action that a text names, or why it cannot be taken now.

        Args:
            text: A part of a reply, as the profile marks actions. It may be any text: empty, long, not ASCII.
        """

    @abstractmethod
    def apply_action(self, action: Action) -> Move:
        """Play an action that `parse_action` returned."""

    @abstractmethod
    def draw_board(self) -> str:
        """Return the board as text: what the policy sees."""

    @abstractmethod
    def state_info(self) -> dict[str, Any]:
        """Return the entries of `info` that describe the state.

        Two of them have a meaning: `state`, a mapping that JSON can hold, and `anchor`, a text that is equal for equal
        states of one task, by which algorithms such as GiGPO compare steps. Others are yours.
        """

    @abstractmethod
    def describe_rules(self) -> str:
        """Return the rules of the game for the policy, without how to reply."""

    def expert_reply(self) -> str:
        """Return what an expert would reply now. Override it if there is an expert."""
        raise NotImplementedError

    def idle_reward(self) -> float:
        """Return the reward of a step whose reply named no possible action."""
        return 0.0

    def available_actions(self) -> list[str] | None:
        """Return all actions that can be taken now, as text; None if they are not listed."""
        return None

    def optimal_steps(self) -> int | None:
        """Return the fewest steps that solve the game from its start; None if that is not known."""
        return None

    def describe_action(self, action: Action) -> str:
        """Return an action as text, as `render` shows it."""
        return str(action)

    def episode_metrics(self) -> dict[str, float]:
        """Return metrics of the game's own; `metadata["metrics"]` says how the steps' values become an episode's."""
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
        self.start_episode(given)
        info = self._info(success=False, valid=True, reward=0.0, penalty=0.0)
        info["instruction"] = f"{self.describe_rules()} {self._reply_format}"
        info["optimal_steps"] = self.optimal_steps()
        return self._observation(), info

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Play the actions that a reply names, or none if it names no valid one."""
        reward, terminated, success, truncated = 0.0, False, False, False
        taken, refusal = False, None
        for text in self._said(action):
            chosen = self.parse_action(text)
            if isinstance(chosen, Refusal):
                refusal = refusal or chosen
                continue
            taken = True
            self._steps += 1
            self._last_action = chosen
            gained, terminated, success, truncated = self.apply_action(chosen)
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
        title = "" if self._last_action is None else f"  ({self.describe_action(self._last_action)})"
        return f"{title}\n{self.draw_board()}\n"

    def _said(self, reply: str) -> Sequence[str]:
        """Return the texts of a reply in the places of actions."""
        return said_actions(reply, self.profile, self._per_turn)

    def _invalid_turn(self, refusal: Refusal) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = 0.0
        self._invalid_turns += 1
        self._last_action = None
        # A reply that costs no step must still not be free for ever: turns beyond the limit are cut as well.
        if self.profile.invalid_costs_step:
            self._steps += 1
            reward = self.idle_reward()
        spent = self._steps if self.profile.invalid_costs_step else self._steps + self._invalid_turns
        truncated = spent >= self._limit
        info = self._info(success=False, valid=False, reward=reward, penalty=self._penalty)
        note = " ".join(filter(None, (self.profile.invalid_note, refusal.reason)))
        return self._noted(note, info), reward + self._penalty, False, truncated, info

    def _observation(self) -> Any:
        board = self.draw_board()
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
            "metrics": {
                "steps": self._steps,
                "invalid_replies": self._invalid_turns,
                **self.episode_metrics(),
            },
            **self.state_info(),
        }
        if (available := self.available_actions()) is not None:
            info["available_actions"] = available
        if self._expert:
            info["expert_action"] = self.expert_reply()
        return info


bridge_old_names(TextGame, _RENAMED)


class NamedGame(TextGame[int]):
    """A game whose `actions` are a few names, always the same. Actions are numbers: positions in that tuple."""

    def __init__(
        self, actions: tuple[str, ...], *, max_episode_steps: int, **common: Unpack[GameKwargs]
    ) -> None:
        super().__init__(", ".join(actions), actions[0], max_episode_steps=max_episode_steps, **common)
        self._actions = actions
        self._names = name_table(actions)
        # A reply that is nothing but a name needs no search for marks.
        self._bare_names = self.profile.bare and self._per_turn == 1

    def expert_action(self) -> int:
        """Return the number of the action that an expert would take now. Override it if there is an expert."""
        raise NotImplementedError

    def _said(self, reply: str) -> Sequence[str]:
        if self._bare_names and reply.lower() in self._names:
            return (reply,)
        return super()._said(reply)

    def parse_action(self, text: str) -> int | Refusal:
        """Return the position of the action that a text names."""
        action = named_action(text, self.profile, self._names)
        return Refusal() if action is None else action

    def available_actions(self) -> list[str] | None:
        """Return the names of all actions."""
        return list(self._actions)

    def describe_action(self, action: int) -> str:
        """Return the name of an action."""
        return self._actions[action]

    def expert_reply(self) -> str:
        """Return the name of the expert's action."""
        return self._actions[self.expert_action()]


def read_numbers(text: str, count: int) -> tuple[int, ...] | None:
    """Return the whole numbers that a text consists of, as `2 3 4` or `(2, 3, 4)`; None if they are not `count`."""
    plain = text.strip("\"'`“”‘’()[] \t\r\n")
    numbers = re.findall(r"\d+", plain) if _NUMBERS.fullmatch(plain) else []
    return tuple(map(int, numbers)) if len(numbers) == count else None
