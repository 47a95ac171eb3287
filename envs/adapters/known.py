"""Instructions for language models on Gymnasium's environments, which do not state them in machine-readable form."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from gymnasium.envs.registration import EnvSpec


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


def sheet_of(spec: EnvSpec | None) -> Sheet | None:
    """Return the sheet of an environment that Gymnasium ships; None of any other."""
    if spec is None or spec.namespace is not None:
        return None
    return _SHEETS.get(spec.name)
