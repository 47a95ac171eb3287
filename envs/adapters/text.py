"""Text adapter: any Gymnasium environment, played by a language model.

Gymnasium's own environments do not state their instructions in machine-readable form: their sheets are here.
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Text
from gymnasium.utils import seeding
from pydantic import Field

from rollgym.clients.protocol.spaces import UnicodeText
from rollgym.envs.adapters.text_spaces import ObservationText, action_text, plain_drawing
from rollgym.envs.core.kwargs import OPERATOR, DeclaredKwargs, OneOf
from rollgym.envs.core.profiles import profile_named, reply_format, said_actions
from rollgym.envs.core.text_game import ActionsPerTurn, FormatPenalty, ProfileName


@dataclass(frozen=True, slots=True)
class Sheet:
    """How one environment is explained.

    Attributes:
        goal: The environment's theme, and the player's task.
        actions: Names of the actions in their order; None for numbers.
        observation_names: Names of the parts of an observation.
        describe: Renders an observation if names do not suffice.
        success: `terminated` if the end of an episode is its goal, or the return that counts as one; None for the
            reward threshold that Gymnasium names.
        observes_state: Whether equal observations are equal states.
    """

    goal: str
    actions: tuple[str, ...] | None = None
    observation_names: tuple[str, ...] | None = None
    describe: Callable[[Any], str] | None = None
    success: Literal["terminated"] | float | None = None
    observes_state: bool = True


def _taxi(observation: Any) -> str:
    number = int(observation)
    number, destination = divmod(number, 4)
    number, passenger = divmod(number, 5)
    row, column = divmod(number, 5)
    stops = (
        "Red (row 0, column 0)",
        "Green (row 0, column 4)",
        "Yellow (row 4, column 0)",
        "Blue (row 4, column 3)",
    )
    waiting = "in the taxi" if passenger == 4 else f"at {stops[passenger]}"
    return f"taxi: row {row}, column {column}\npassenger: {waiting}\ndestination: {stops[destination]}"


def _lake(observation: Any) -> str:
    return f"your cell: {int(observation)}"


def _cliff(observation: Any) -> str:
    row, column = divmod(int(observation), 12)
    return f"you: row {row}, column {column}"


_LAKE = Sheet(
    "You walk on a frozen lake, drawn row by row: S is the start, F is ice, H is a hole, G is the goal, and your cell "
    "stands in brackets. Cells are counted row by row from 0. Reach the goal; a hole ends the game. "
    "Each action moves you one cell, and where the ice is slippery you may slide sideways.",
    actions=("Left", "Down", "Right", "Up"),
    describe=_lake,
)
_CLIFF = Sheet(
    "You walk on a grid, drawn row by row: x is you, T is the target, C is the cliff, o is ground. Reach the target in "
    "as few steps as you can; stepping off the cliff costs much and takes you back to the start.",
    actions=("Up", "Right", "Down", "Left"),
    describe=_cliff,
    success="terminated",
)
_CAR_NAMES = ("position", "velocity")

_SHEETS: Mapping[str, Sheet] = MappingProxyType(
    {
        "FrozenLake": _LAKE,
        "FrozenLake8x8": _LAKE,
        "CliffWalking": _CLIFF,
        "CliffWalkingSlippery": _CLIFF,
        "Taxi": Sheet(
            "You drive a taxi on a grid of 5 by 5 with walls (|), drawn row by row; the taxi stands in brackets, "
            "passenger and destination in parentheses. South is down. Drive to the passenger, pick them up, drive to "
            "their destination and drop them off there. Each step costs 1; picking up or dropping off at a wrong place "
            "costs 10.",
            actions=("South", "North", "East", "West", "Pickup", "Dropoff"),
            describe=_taxi,
            success="terminated",
        ),
        "Blackjack": Sheet(
            "You play blackjack against the dealer. Hit for another card or stick with what you have: come as near to "
            "21 as you can without going beyond.",
            actions=("Stick", "Hit"),
            observation_names=("your sum", "the dealer's open card", "usable ace (1 yes, 0 no)"),
            success=1.0,
            observes_state=False,
        ),
        "CartPole": Sheet(
            "A pole stands on a cart that moves along a track. Push the cart to the left or to the right at each step, "
            "so that the pole stays upright and the cart on the track for as long as possible. Positive numbers are to "
            "the right. The episode ends beyond position 2.4 or angle 0.2095.",
            actions=("Left", "Right"),
            observation_names=(
                "cart position",
                "cart velocity",
                "pole angle (radians)",
                "pole angular velocity",
            ),
        ),
        "MountainCar": Sheet(
            "A car stands in a valley between two hills, too weak to drive up at once. Swing it back and forth to "
            "reach the flag on the right hill at position 0.5, in as few steps as you can.",
            actions=("Left", "Coast", "Right"),
            observation_names=_CAR_NAMES,
            success="terminated",
        ),
        "MountainCarContinuous": Sheet(
            "A car stands in a valley between two hills, too weak to drive up at once. Swing it back and forth to "
            "reach the flag on the right hill at position 0.45, with as little force as you can. An action is the "
            "force: negative to the left.",
            observation_names=_CAR_NAMES,
            success="terminated",
        ),
        "Acrobot": Sheet(
            "Two links hang from a joint, and there is a motor between them. Turn it to swing the free end up above "
            "the bar, in as few steps as you can.",
            actions=("Turn negative", "Rest", "Turn positive"),
            observation_names=(
                "cosine of the first angle",
                "sine of the first angle",
                "cosine of the second angle",
                "sine of the second angle",
                "first angular velocity",
                "second angular velocity",
            ),
            success="terminated",
        ),
        "Pendulum": Sheet(
            "A pendulum hangs from a motor. Swing it up and keep it upright with as little torque as you can. An "
            "action is the torque.",
            observation_names=(
                "x of the free end (1 is upright)",
                "y of the free end",
                "angular velocity",
            ),
        ),
    }
)


def _sheet_of(spec: EnvSpec | None) -> Sheet | None:
    """Return the sheet of an environment that Gymnasium ships; None of any other."""
    if spec is None or spec.namespace is not None:
        return None
    return _SHEETS.get(spec.name)


DEFAULT_MAX_STEPS = 1_000
"""Turn limit for environments without one of their own: unreadable replies would otherwise continue for ever."""

_SHOWN = ("observation", "render", "both")


class TextAdapter(DeclaredKwargs, gymnasium.Env[str, str]):
    """Shows a Gymnasium environment as text and takes its actions from replies.

    Seeds and options go to the environment as they are, and so does each action that a reply names, so an episode is
    the same as without the adapter. A reply that names none leaves the environment as it is, counts as a step, and
    costs the format penalty.

    `env` is a Gymnasium id, or an environment, which then belongs to the adapter. Other kwargs are the environment's
    own, if `env` is an id. What is null is known for the environments that come with Gymnasium.

    Raises:
        ValueError: If an argument makes no sense, or the environment cannot be played as text.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4, "kind": "episodic", "version": "0"}

    def __init__(
        self,
        env: Annotated[str | gymnasium.Env[Any, Any], OPERATOR],
        *,
        actions: Annotated[
            Sequence[str] | Mapping[str, Any] | None,
            OPERATOR,
            Field(
                description=(
                    "Names of a `Discrete`'s actions in their order, or actions of any space by name. "
                    "Where none are given, an action is said as its number or numbers."
                )
            ),
        ] = None,
        observation_names: Annotated[
            Sequence[str] | None, OPERATOR, Field(description="What the parts of an observation are called.")
        ] = None,
        instruction: Annotated[
            str | None,
            OPERATOR,
            Field(description="What the environment is about and what to do; how to reply is added."),
        ] = None,
        show: Annotated[
            str | None,
            OneOf(*_SHOWN, None),
            Field(
                description=(
                    "What the policy sees: the `observation`, the environment's own `ansi` drawing "
                    "(`render`) or `both`. null for both where there is a drawing."
                )
            ),
        ] = None,
        precision: Annotated[
            int, Field(ge=1, le=17, description="Significant digits of numbers that are not whole.")
        ] = 4,
        success: Annotated[
            Literal["terminated"] | float | None,
            OPERATOR,
            Field(
                description=(
                    "When an episode counts as solved: `terminated` if its end is its goal, or the return"
                    " that it takes. If null, the reward threshold of the environment's registration "
                    'decides. What the environment itself says in `info["success"]` or '
                    '`info["is_success"]` goes before.'
                )
            ),
        ] = None,
        fully_observed: Annotated[
            bool | None,
            OPERATOR,
            Field(
                description="Whether equal observations are equal states, so that steps can be compared by them."
            ),
        ] = None,
        max_episode_steps: Annotated[
            int | None,
            Field(
                ge=1,
                description="Steps after which an episode is truncated; the environment's own limit if null.",
            ),
        ] = None,
        profile: ProfileName = "native",
        format_penalty: FormatPenalty = None,
        max_actions_per_turn: ActionsPerTurn = 1,
        render_mode: Annotated[
            str | None,
            OneOf("ansi", "rgb_array", None),
            Field(description='"ansi", or "rgb_array" where the environment has it.'),
        ] = None,
        **kwargs: Any,
    ) -> None:
        self.profile = profile_named(profile)
        self.env = _made(env, max_episode_steps, kwargs)
        spec = self.env.spec
        sheet = _sheet_of(spec) or Sheet(f"You act in {_name(self.env)}.", observes_state=False)
        self.metadata = text_metadata(spec, self.env.metadata)
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(
                f"render_mode must be one of {', '.join(self.metadata['render_modes'])}, not {render_mode!r}"
            )
        self.render_mode = render_mode
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()
        self._show = _checked_show(show, self.env.metadata)
        self._actions = action_text(self.env.action_space, sheet.actions if actions is None else actions)
        self._describe = None if self._show == "render" else self._writer(sheet, observation_names, precision)
        self._success = _success_rule(success, sheet, spec)
        self._observes_state = sheet.observes_state if fully_observed is None else fully_observed
        self._goal = sheet.goal if instruction is None else instruction
        self._limit = max_episode_steps or step_limit(spec)
        self._penalty = self.profile.default_penalty if format_penalty is None else float(format_penalty)
        self._per_turn = max_actions_per_turn
        self._steps = 0
        self._invalid_turns = 0
        self._return = 0.0
        self._seen: Any = None
        self._inner: Mapping[str, Any] = {}
        self._text = ""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode of the environment, with its own seed and options."""
        super().reset(seed=seed)
        observation, inner = self.env.reset(seed=seed, options=options)
        self._steps = 0
        self._invalid_turns = 0
        self._return = 0.0
        self._see(observation, inner)
        info = self._info(success=False, valid=True, reward=0.0, penalty=0.0)
        form = reply_format(self.profile, self._actions.description, self._actions.example, self._per_turn)
        info["instruction"] = f"{self._goal} {form}"
        return self._observation(), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play the actions that a reply names, or none if it cannot be read."""
        said = said_actions(action, self.profile, self._per_turn)
        chosen = [one for part in said if (one := self._actions.read(part, self.profile.inside)) is not None]
        if not chosen:
            return self._invalid_turn()
        gained, terminated, truncated = 0.0, False, False
        for one in chosen:
            observation, reward, terminated, truncated, inner = self.env.step(one)
            self._steps += 1
            gained += float(reward)
            if terminated or truncated or self._turns() >= self._limit:
                break
        self._return += gained
        self._see(observation, inner)
        ended = bool(terminated) or bool(truncated)
        truncated = bool(truncated) or (not terminated and self._turns() >= self._limit)
        success = self._solved(terminated=bool(terminated), ended=ended, over=bool(terminated) or truncated)
        info = self._info(success=success, valid=True, reward=gained, penalty=0.0)
        return self._observation(), gained, bool(terminated), truncated, info

    def render(self) -> Any:
        """Return the environment's picture or drawing, by `render_mode`; its observation as text if it has none."""
        if self.render_mode is None:
            return None
        if self.render_mode == "ansi" and "ansi" not in _modes(self.env.metadata):
            return self._text
        return self._draw(self.render_mode)

    def reseed(self, seed: int) -> None:
        """Give the environment's generator a new seed in the middle of an episode."""
        base = self.env.unwrapped
        own = getattr(base, "reseed", None)
        if own is not None:
            own(seed)
        else:
            base.np_random, _ = seeding.np_random(seed)

    def close(self) -> None:
        """Close the Gymnasium environment behind the adapter."""
        self.env.close()

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _writer(self, sheet: Sheet, names: Sequence[str] | None, precision: int) -> Any:
        if names is None and sheet.describe is not None:
            return sheet.describe
        names = sheet.observation_names if names is None else names
        return ObservationText(self.env.observation_space, names, precision).write

    def _see(self, observation: Any, inner: Mapping[str, Any]) -> None:
        self._seen, self._inner = observation, inner
        parts = []
        if self._show != "observation":
            parts.append(plain_drawing(str(self._draw("ansi"))))
        if self._describe is not None:
            parts.append(self._describe(observation))
        self._text = "\n\n".join(parts)

    def _draw(self, mode: str) -> Any:
        """Render in a mode, even if the environment was made with another one."""
        base = self.env.unwrapped
        made_with = base.render_mode
        base.render_mode = mode
        try:
            return self.env.render()
        finally:
            base.render_mode = made_with

    def _turns(self) -> int:
        return self._steps + self._invalid_turns

    def _invalid_turn(self) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._invalid_turns += 1
        # What an earlier turn gave away must not come again as the same object.
        self._seen, self._inner = copy.deepcopy((self._seen, dict(self._inner)))
        truncated = self._turns() >= self._limit
        success = self._solved(terminated=False, ended=False, over=truncated)
        info = self._info(success=success, valid=False, reward=0.0, penalty=self._penalty)
        text = f"{self.profile.invalid_note}\n{self._observation()}"
        return text, self._penalty, False, truncated, info

    def _solved(self, *, terminated: bool, ended: bool, over: bool) -> bool:
        for name in ("success", "is_success"):
            if name in self._inner:
                return bool(self._inner[name])
        if self._success is None or not over:
            return False
        if self._success == "terminated":
            return terminated
        # Where steps cost, an episode that unreadable replies used up has cost little and achieved nothing.
        return self._return >= self._success and (ended or self._success > 0)

    def _observation(self) -> str:
        template = self.profile.template
        if template == "{board}":
            return self._text
        left = max(0, self._limit - self._turns())
        return template.format(board=self._text, left=left, actions=self._actions.description)

    def _info(self, *, success: bool, valid: bool, reward: float, penalty: float) -> dict[str, Any]:
        metrics = self._inner.get("metrics")
        counts = {"steps": self._turns(), "invalid_replies": self._invalid_turns}
        info = {
            **self._inner,
            "success": success,
            "action_is_valid": valid,
            "format_penalty": penalty,
            "env_reward": reward,
            "metrics": {**metrics, **counts} if isinstance(metrics, Mapping) else counts,
            "state": {"observation": self._seen},
        }
        if self._actions.names:
            info["available_actions"] = self._available()
        if self._observes_state and "anchor" not in info:
            info["anchor"] = json.dumps(self.env.observation_space.to_jsonable([self._seen])[0], default=str)
        return info

    def _available(self) -> list[str]:
        """Return the actions' names; if the environment gives a mask, those that the mask allows."""
        mask = self._inner.get("action_mask")
        names = list(self._actions.names)
        if mask is None or len(mask) != len(names):
            return names
        return [name for name, allowed in zip(names, mask, strict=True) if allowed]


def text_metadata(spec: EnvSpec | None, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an adapter says of itself: what the environment says, and how it is drawn now.

    Args:
        spec: The environment's registration.
        metadata: The environment's metadata.
    """
    sheet = _sheet_of(spec)
    known = (
        {}
        if spec is None
        else {"version": str(spec.version or 0), "deterministic": not spec.nondeterministic}
    )
    description = "A Gymnasium environment, played in text." if sheet is None else sheet.goal
    modes = [mode for mode in _modes(metadata) if mode == "rgb_array"]
    return {
        "version": "0",
        "deterministic": False,
        **known,
        **metadata,
        "kind": "episodic",
        "description": description,
        "metrics": {**metadata.get("metrics", {}), "steps": "last", "invalid_replies": "last"},
        "render_modes": ["ansi", *modes],
        "max_episode_steps": step_limit(spec),
    }


def step_limit(spec: EnvSpec | None) -> int:
    """Return the default number of steps after which an adapter truncates."""
    return (spec.max_episode_steps if spec is not None else None) or DEFAULT_MAX_STEPS


def _modes(metadata: Mapping[str, Any]) -> list[str]:
    return [str(mode) for mode in metadata.get("render_modes") or ()]


def _made(
    env: str | gymnasium.Env[Any, Any], max_episode_steps: int | None, kwargs: Mapping[str, Any]
) -> gymnasium.Env[Any, Any]:
    if isinstance(env, str):
        # The checker repeats at every first step what `roll-env check` says once to the author.
        made = gymnasium.make(env, max_episode_steps=max_episode_steps, disable_env_checker=True, **kwargs)
    elif kwargs:
        raise ValueError(
            f"{', '.join(kwargs)}: kwargs are for an environment given by its id; set them on {env}"
        )
    else:
        made = env
    if isinstance(made.action_space, UnicodeText | Text):
        raise ValueError(f"{_name(made)} takes text already: serve it as it is")
    return made


def _name(env: gymnasium.Env[Any, Any]) -> str:
    return type(env.unwrapped).__name__ if env.spec is None else env.spec.id


def _checked_show(show: str | None, metadata: Mapping[str, Any]) -> str:
    draws = "ansi" in _modes(metadata)
    if show is None:
        return "both" if draws else "observation"
    if show != "observation" and not draws:
        raise ValueError(f"show={show!r} needs an environment with an ansi rendering; this one has none")
    return show


def _success_rule(
    success: Literal["terminated"] | float | None, sheet: Sheet, spec: EnvSpec | None
) -> Literal["terminated"] | float | None:
    if success is not None:
        return success
    if sheet.success is not None:
        return sheet.success
    return None if spec is None else spec.reward_threshold
