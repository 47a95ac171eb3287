"""Games of several players as environments of one: self-play turn by turn, or against a scripted opponent."""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, Unpack

import numpy as np
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from rollgym.envs.core.kwargs import OneOf
from rollgym.envs.core.text_game import GameKwargs, Move, Refusal, TextGame

Opponent = Callable[[str, Sequence[str], np.random.Generator], str]
"""Says what an opponent does, from what it sees, the actions that are listed, and a generator of the episode's own."""

Action = TypeVar("Action")

_DEALS = 100


def random_opponent(observation: str, actions: Sequence[str], generator: np.random.Generator) -> str:
    """Return a random one of the listed actions.

    Raises:
        ValueError: If none are listed.
    """
    if not actions:
        raise ValueError(
            "this game does not list its actions, so the opponent cannot choose at random: play opponent='self', or "
            "give a callable that says what to do"
        )
    return actions[int(generator.integers(len(actions)))]


OPPONENTS: Mapping[str, Opponent | None] = {"self": None, "random": random_opponent}

OpponentName = Annotated[
    Annotated[str, OneOf(*OPPONENTS)] | SkipJsonSchema[Opponent],
    Field(
        description="`self`: one policy acts for all players in turn; `random`: the others take any of the actions "
        "that the game lists. In Python also a callable."
    ),
]
Seat = Annotated[
    int | None,
    Field(ge=0, description="Which player the policy is, against an opponent; drawn by the seed if null."),
]


class SeatedGame(TextGame[Action]):
    """A game of several players, of whom one acts at a time.

    In self-play one policy acts for all players in turn. The observation says who is to act, and so does
    `info["agent"]`. The reward of a step is what the player who acted has gained since they acted before;
    `info["rewards"]` is what each player gained in the step, the losers too. Success is that who made the last move has
    gained more than nothing in all.

    Against an opponent one policy has one seat, the others are played for it, and reward and success are its own.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = TextGame.metadata | {"inline": False}

    def __init__(
        self,
        form: str,
        example: str,
        seats: Sequence[str],
        *,
        opponent: str | Opponent,
        seat: int | None,
        max_episode_steps: int,
        **common: Unpack[GameKwargs],
    ) -> None:
        super().__init__(form, example, max_episode_steps=max_episode_steps, **common)
        if seat is not None and seat >= len(seats):
            raise ValueError(f"seat must be between 0 and {len(seats) - 1}, not {seat}")
        self._opponent = OPPONENTS[opponent] if isinstance(opponent, str) else opponent
        if seat is not None and self._opponent is None:
            raise ValueError("seat is for play against an opponent: in self-play the policy has all of them")
        self._seats = tuple(seats)
        self._wanted_seat = seat
        self._seat: str | None = None
        self._credited: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._history: list[list[str]] = []

    # -- what an adapter implements --------------------------------------------------------------------------------

    @abstractmethod
    def _start(self, seed: int) -> None:
        """Begin an episode of the game."""

    @abstractmethod
    def _acting(self) -> str | None:
        """Return the player whose turn it is; None when the game is over."""

    @abstractmethod
    def _act(self, action: Action) -> None:
        """Act for the player whose turn it is."""

    @abstractmethod
    def _scores(self) -> Mapping[str, float]:
        """Return what each player has gained so far."""

    @abstractmethod
    def _view(self) -> str:
        """Return what the player whose turn it is sees; after the end, what the policy's player sees."""

    @abstractmethod
    def _cut(self) -> bool:
        """Return whether the game is over because of a limit of its own."""

    def _won(self, gained: float) -> bool:
        """Return whether a player who has gained so much in all has won."""
        return gained > 0

    # -- the game --------------------------------------------------------------------------------------------------

    def render(self) -> Any:
        """Return the board as text, below the last move of any player."""
        if self.render_mode != "ansi":
            return None
        title = f"  ({': '.join(self._history[-1])})" if self._history else ""
        return f"{title}\n{self.draw_board()}\n"

    def start_episode(self, options: Mapping[str, Any]) -> None:
        for _ in range(_DEALS):
            self._deal()
            # If the opponent gives up at once, nothing is left to play.
            if self._acting() is not None:
                return
        raise ValueError(
            f"{_DEALS} games were over before it was the policy's turn: take another opponent, or seat"
        )

    def _deal(self) -> None:
        self._history = []
        self._start(int(self.np_random.integers(2**31)))
        self._seat = None
        if self._opponent is not None:
            drawn = int(self.np_random.integers(len(self._seats)))
            self._seat = self._seats[drawn if self._wanted_seat is None else self._wanted_seat]
        self._credited = dict.fromkeys(self._seats, 0.0)
        self._before = dict.fromkeys(self._seats, 0.0)
        self._play_opponents()

    def apply_action(self, action: Action) -> Move:
        actor = self._acting()
        assert actor is not None
        self._before = dict(self._scores())
        self._play(actor, action)
        self._play_opponents()
        total = self._scores()[actor]
        gained, self._credited[actor] = total - self._credited[actor], total
        over, cut = self._acting() is None, self._cut()
        return Move(gained, over and not cut, over and self._won(total), over and cut)

    def _play(self, actor: str, action: Action) -> None:
        self._history.append([actor, self.describe_action(action)])
        self._act(action)

    def _play_opponents(self) -> None:
        """Act for the others until it is the policy's turn, or the game is over."""
        while self._opponent is not None and (actor := self._acting()) not in (None, self._seat):
            assert actor is not None
            said = self._opponent(self._view(), self.available_actions() or (), self.np_random)
            action = self.parse_action(said)
            if isinstance(action, Refusal):
                raise ValueError(f"the opponent said {said!r}, which is no action: {action.reason}")
            self._play(actor, action)

    def draw_board(self) -> str:
        actor = self._acting()
        if actor is not None:
            return f"{self._view()}\nIt is your turn as {actor}."
        gained = ", ".join(f"{agent} {score:g}" for agent, score in self._scores().items())
        return f"{self._view()}\nThe game is over: {gained}."

    def state_info(self) -> dict[str, Any]:
        scores = self._scores()
        return {
            # What was done by whom says all of the state, hidden parts included: the seed did the rest.
            "anchor": hashlib.blake2b(repr(self._history).encode(), digest_size=12).hexdigest(),
            "state": {"history": [list(each) for each in self._history], "seat": self._seat},
            "agent": self._acting(),
            "rewards": {agent: scores[agent] - self._before[agent] for agent in self._seats},
        }
