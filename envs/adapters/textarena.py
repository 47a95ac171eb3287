"""TextArena adapter: its games of one or more players, in self-play or against a scripted opponent."""

import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from rollgym.envs.adapters.seats import OpponentName, Seat, SeatedGame
from rollgym.envs.core.kwargs import OPERATOR, RenderMode
from rollgym.envs.core.text_game import ActionsPerTurn, FormatPenalty, ProfileName, Refusal, StepLimit
from rollgym.extras import import_extra
from rollgym.suggestions import near_names

_MOVE = re.compile(r"'(\[[^\[\]\n]{1,40}\])'")
_LONGEST = 20_000
_MOST_PLAYERS = 16


class TextArenaAdapter(SeatedGame[str]):
    """A game of TextArena; needs the extra `textarena`.

    Its rules of conduct stay: a move that the game calls invalid may be made again, and the second one in a row loses.
    Other kwargs are the game's own.

    Raises:
        ValueError: If an argument makes no sense, or the game cannot be made here.
        MissingExtraError: If TextArena is not installed.
    """

    metadata: dict[str, Any] = SeatedGame.metadata | {
        "description": "A game of TextArena.",
        "max_episode_steps": 200,
    }

    def __init__(
        self,
        game: Annotated[str, OPERATOR, Field(description="Its id, such as `TicTacToe-v0`.")],
        *,
        players: Annotated[
            int | None, OPERATOR, Field(description="How many play; the fewest that the game takes if null.")
        ] = None,
        opponent: OpponentName = "self",
        seat: Seat = None,
        history: Annotated[
            bool | None,
            Field(
                description=(
                    "Whether an observation is all that the player has seen, or only what is new since "
                    "their last turn. If null, all of it in self-play, where a conversation would tell "
                    "each player what only the other may know."
                )
            ),
        ] = None,
        max_episode_steps: StepLimit = 200,
        profile: ProfileName = "native",
        format_penalty: FormatPenalty = None,
        max_actions_per_turn: ActionsPerTurn = 1,
        render_mode: RenderMode = None,
        **kwargs: Any,
    ) -> None:
        self._arena = import_extra("textarena", "textarena")
        self._generators = _Generators()
        self._source = game, kwargs
        with self._generators.swapped():
            self._game, self._brackets = _made(self._arena, game, kwargs)
            count = _player_count(self._game, game, players)
        if count == 1 and (opponent != "self" or seat is not None):
            raise ValueError(f"{game} is for one player: leave opponent and seat out")
        self._players = count
        super().__init__(
            "what the game asks for" + (", in brackets" if self._brackets else ""),
            "[action]" if self._brackets else "your words",
            [f"Player {number}" for number in range(count)],
            opponent=opponent,
            seat=seat,
            max_episode_steps=max_episode_steps,
            profile=profile,
            format_penalty=format_penalty,
            max_actions_per_turn=max_actions_per_turn,
            render_mode=render_mode,
        )
        self._shows_history = (self._opponent is None and count > 1) if history is None else history
        self._seen: dict[str, list[str]] = {}
        self._fresh: dict[str, list[str]] = {}
        self._listed: list[str] = []
        self._over = False
        self._refused = False
        self._warned: str | None = None

    def _start(self, seed: int) -> None:
        self._over = self._refused = False
        self._seen = {agent: [] for agent in self._seats}
        self._fresh = {agent: [] for agent in self._seats}
        with self._generators.swapped(seed):
            # A new one each time: what some games leave behind of the last episode is in their next one.
            self._game, _ = _made(self._arena, *self._source)
            self._game.reset(num_players=self._players, seed=seed)
        self._look()

    def _acting(self) -> str | None:
        return None if self._over else self._seats[self._game.state.current_player_id]

    def _cut(self) -> bool:
        return False

    def _act(self, action: str) -> None:
        actor = self._acting()
        assert actor is not None
        # What was seen before this turn is old for this player from now on.
        self._fresh[actor] = []
        with self._generators.swapped():
            self._over, _ = self._game.step(action=action)
        self._look()
        lost_by_it = self._game.state.game_info[self._seats.index(actor)]["invalid_move"]
        self._refused = self._warned == actor or (self._over and bool(lost_by_it))

    def _look(self) -> None:
        """Take the game's messages to each player; the game writes lists of moves in quotes and brackets."""
        kinds = self._arena.ObservationType
        self._listed, self._warned = [], None
        for number, agent in enumerate(self._seats):
            messages = self._game.state.observations[number]
            self._game.state.observations[number] = []
            texts = [f"[{self._speaker(sender)}] {text.strip()}" for sender, text, _ in messages]
            self._seen[agent] += texts
            self._fresh[agent] += texts
            if any(kind is kinds.GAME_ADMIN and "invalid move" in text for _, text, kind in messages):
                self._warned = agent
            told = [text for _, text, kind in messages if kind in (kinds.GAME_BOARD, kinds.GAME_MESSAGE)]
            if agent == self._acting() and told:
                self._listed = list(dict.fromkeys(_MOVE.findall(told[-1])))

    def _speaker(self, sender: int) -> str:
        return "Game" if sender < 0 else self._seats[sender]

    def _scores(self) -> Mapping[str, float]:
        rewards = self._game.state.rewards or {}
        return {agent: float(rewards.get(number, 0.0)) for number, agent in enumerate(self._seats)}

    def _view(self) -> str:
        agent = self._acting() or self._seat or self._history[-1][0]
        texts = self._seen[agent] if self._shows_history else self._fresh[agent]
        if not self._over:
            return "\n".join(texts)
        # The reason of an outcome is in no message.
        reason = self._game.state.game_info[self._seats.index(agent)].get("reason")
        return "\n".join([*texts, *([f"[Game] {reason}"] if reason else [])])

    def parse_action(self, text: str) -> str | Refusal:
        said = text.strip()
        if not said or len(said) > _LONGEST:
            return Refusal("Say something." if not said else f"Say it in at most {_LONGEST} characters.")
        return f"[{said}]" if self._brackets and "[" not in said else said

    def available_actions(self) -> list[str] | None:
        return list(self._listed) or None

    def _won(self, gained: float) -> bool:
        # A puzzle for one pays the share that was solved.
        return gained >= 1 if self._players == 1 else gained > 0

    def describe_rules(self) -> str:
        many = f" There are {self._players} players." if self._players > 1 else ""
        return f"You play a game; what it tells you says how.{many}"

    def _info(self, *, success: bool, valid: bool, reward: float, penalty: float) -> dict[str, Any]:
        return super()._info(
            success=success, valid=valid and not self._refused, reward=reward, penalty=penalty
        )


class _Generators:
    """A game's own state of the global generators, which TextArena's games draw from."""

    def __init__(self) -> None:
        self._states = random.Random(0).getstate(), np.random.RandomState(0).get_state()

    @contextmanager
    def swapped(self, seed: int | None = None) -> Iterator[None]:
        """Install the game's state while the context is open, reseeded if a seed is given."""
        outside = random.getstate(), np.random.get_state()
        if seed is not None:
            self._states = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        try:
            yield
        finally:
            self._states = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])


def _made(arena: Any, game: str, kwargs: Mapping[str, Any]) -> tuple[Any, bool]:
    """Make a game without wrappers; say whether its moves stand in brackets."""
    registry = import_extra("textarena.envs.registration", "textarena").ENV_REGISTRY
    if game not in registry or f"{game}-raw" not in registry:
        known = [name.removesuffix("-raw") for name in registry if name.endswith("-raw")]
        near = near_names(game, known, 3)
        raise ValueError(f"TextArena has no game {game!r}" + (f"; near: {', '.join(near)}" if near else ""))
    wrappers = [wrapper.__name__ for wrapper in registry[game].default_wrappers or ()]
    try:
        return arena.make(f"{game}-raw", **kwargs), "ActionFormattingWrapper" in wrappers
    except (ImportError, LookupError, OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{game} cannot be made here: {_told(error)}") from error


def _player_count(made: Any, game: str, wanted: int | None) -> int:
    """Return how many play: games refuse other numbers at a reset, and say nowhere else what they take."""
    refused: Exception | None = None
    for count in range(1, _MOST_PLAYERS + 1) if wanted is None else (wanted,):
        try:
            made.reset(num_players=count, seed=0)
        except (AssertionError, ValueError) as error:
            refused = error
        except (LookupError, OSError) as error:
            raise ValueError(f"{game} cannot begin here: {_told(error)}") from error
        else:
            return count
    told = f": {_told(refused)}" if refused is not None else ""
    raise ValueError(f"{game} takes no {wanted or f'1 to {_MOST_PLAYERS}'} players{told}") from refused


def _told(error: Exception) -> str:
    """Return what an error says, in one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).replace('*', ' ').split())[:200]}"
