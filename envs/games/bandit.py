"""Bandit-v0: arms with names and stories, one of which pays best in the long run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Unpack

from pydantic import Field

from rollgym.envs.core.text_game import GameKwargs, Move, NamedGame, Refusal

NAMES = ("Phoenix", "Dragon", "Tortoise", "Fox", "Raven", "Bear", "Otter", "Lynx")
_STORIES: Mapping[float, str] = {
    1.0: "is steady: it pays the same each time",
    0.5: "is moody: it pays about every second time",
    0.25: "is wild: it pays about every fourth time",
    0.1: "is a dreamer: it pays about every tenth time, and then much",
}
_BEST, _OTHERS = (0.7, 1.0), (0.1, 0.5)


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm, which pays `prize` with probability `chance`."""

    name: str
    chance: float
    prize: float

    @property
    def mean(self) -> float:
        """Return the arm's mean payment."""
        return self.chance * self.prize


class BanditEnv(NamedGame):
    """Arms that pay by chance. Their stories say how often they pay, not how much.

    An episode is solved if more than half of its pulls were of the arm that pays most on average; that one pays 0.7 to
    1 a pull, the others at most 0.5.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = NamedGame.metadata | {
        "description": "Find the arm that pays best in the long run.",
        "observation": "What the last pulls paid, and how many are left.",
        "actions": "The name of an arm.",
        "reward": "What the arm pays. Success: more than half of the pulls were of the best arm.",
        "max_episode_steps": 40,
        "metrics": {**NamedGame.metadata["metrics"], "regret": "last"},
        "baselines": {
            "random": [0, 7.6],
            "constant action": [0.24, 8.43],
            "echo of the instruction": [0, 0.361],
            "blind": [0.19, 7.56],
            "expert": [1, 17.8],
        },
    }

    def __init__(
        self,
        *,
        arms: Annotated[int, Field(ge=2, le=len(NAMES), description="How many there are.")] = 5,
        pulls: Annotated[int, Field(ge=1, le=1000, description="After so many the episode is over.")] = 20,
        stories: Annotated[
            bool, Field(description="Whether the instruction tells how often each arm pays.")
        ] = True,
        max_episode_steps: Annotated[
            int, Field(ge=1, description="Steps after which the episode is truncated, pulls and others.")
        ] = 40,
        **common: Unpack[GameKwargs],
    ) -> None:
        if pulls > max_episode_steps:
            raise ValueError(f"pulls must be at most max_episode_steps ({max_episode_steps}), not {pulls}")
        super().__init__(NAMES[:arms], max_episode_steps=max_episode_steps, **common)
        self._pulls = pulls
        self._tells_stories = stories
        self._arms: tuple[Arm, ...] = tuple(Arm(name, 1.0, 0.0) for name in self._actions)
        self._history: list[tuple[int, float]] = []

    @property
    def optimal_arm(self) -> int:
        """The arm that pays most on average: for tests and viewers, not for a policy."""
        return max(range(len(self._arms)), key=lambda arm: self._arms[arm].mean)

    def start_episode(self, options: Mapping[str, Any]) -> None:
        best = int(self.np_random.integers(len(self._actions)))
        chances = self.np_random.choice(list(_STORIES), len(self._actions)).tolist()
        means = self.np_random.uniform(*_OTHERS, len(self._actions)).tolist()
        means[best] = float(self.np_random.uniform(*_BEST))
        self._arms = tuple(
            Arm(name, chance, round(mean / chance, 2))
            for name, chance, mean in zip(self._actions, chances, means, strict=True)
        )
        self._history = []

    def parse_action(self, text: str) -> int | Refusal:
        action = super().parse_action(text)
        return Refusal(f"Name one of the arms: {self._form}.") if isinstance(action, Refusal) else action

    def apply_action(self, action: int) -> Move:
        arm = self._arms[action]
        paid = arm.prize if self.np_random.random() < arm.chance else 0.0
        self._history.append((action, paid))
        if len(self._history) < self._pulls:
            return Move(paid, False, False)
        good = sum(pulled == self.optimal_arm for pulled, _ in self._history)
        return Move(paid, True, 2 * good > self._pulls)

    def draw_board(self) -> str:
        rows = [f"Pull {len(self._history)} of {self._pulls} is done." if self._history else "No pull yet."]
        for action, name in enumerate(self._actions):
            paid = [amount for pulled, amount in self._history if pulled == action]
            if paid:
                rows.append(f"{name}: paid {', '.join(f'{amount:g}' for amount in paid)}")
        return "\n".join(rows)

    def state_info(self) -> dict[str, Any]:
        history = [[self._actions[action], paid] for action, paid in self._history]
        return {"anchor": str(history), "state": {"history": history}}

    def episode_metrics(self) -> dict[str, float]:
        best = self._arms[self.optimal_arm].mean
        regret = sum(best - self._arms[action].mean for action, _ in self._history)
        return {"regret": round(regret, 6)}

    def describe_rules(self) -> str:
        arms = ", ".join(self._actions)
        text = f"There are the arms {arms}. At each of {self._pulls} pulls choose one; it pays something, or nothing. "
        if self._tells_stories:
            stories = "; ".join(f"{arm.name} {_STORIES[arm.chance]}" for arm in self._arms)
            text += f"{stories}. "
        return (
            text
            + "How much an arm pays you have to find out. One of them pays most in the long run: pull it as often "
            "as you can, in more than half of all pulls at least."
        )

    def optimal_steps(self) -> int:
        return self._pulls

    def expert_action(self) -> int:
        return self.optimal_arm
