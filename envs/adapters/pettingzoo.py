"""PettingZoo adapter: the classic games of several players, in self-play or against a scripted opponent.

Their observations are planes of numbers, so each game has instructions for language models.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from rollgym.envs.adapters.seats import OpponentName, Seat, SeatedGame
from rollgym.envs.core.kwargs import OPERATOR, OneOf, RenderMode
from rollgym.envs.core.profiles import bare_word
from rollgym.envs.core.text_game import ActionsPerTurn, FormatPenalty, ProfileName, Refusal, StepLimit
from rollgym.extras import import_extra

Namer = Callable[[Any, str, Sequence[int]], list[str]]
"""Names legal actions of a player, given the environment without its wrappers."""
Viewer = Callable[[Any, str, Any], str]
"""Writes an observation of a player, given the environment without its wrappers."""


@dataclass(frozen=True, slots=True)
class GameSheet:
    """How one game is explained.

    Attributes:
        rules: The game's theme, and the player's task.
        form: The form of actions.
        example: One of them.
        names: Names legal actions.
        view: Writes what a player sees.
    """

    rules: str
    form: str
    example: str
    names: Namer
    view: Viewer


def _numbers(game: Any, agent: str, legal: Sequence[int]) -> list[str]:
    return [str(action) for action in legal]


def _listed(*names: str) -> Namer:
    return lambda game, agent, legal: [names[action] for action in legal]


def _planes(observation: Any, empty: Callable[[int, int], str]) -> list[list[str]]:
    """Draw two planes, one's own and the other's, as X and O."""
    mine, theirs = observation["observation"][..., 0], observation["observation"][..., 1]
    return [
        [
            "X" if mine[row, column] else "O" if theirs[row, column] else empty(row, column)
            for column in range(mine.shape[1])
        ]
        for row in range(mine.shape[0])
    ]


def _tictactoe(game: Any, agent: str, observation: Any) -> str:
    # PettingZoo counts the squares down the first dimension of its planes, which it draws from left to right.
    cells = np.array(_planes(observation, lambda row, column: str(3 * row + column))).T
    return "\n".join(" ".join(row) for row in cells)


def _connect_four(game: Any, agent: str, observation: Any) -> str:
    rows = [" ".join(row) for row in _planes(observation, lambda row, column: ".")]
    return "\n".join(["0 1 2 3 4 5 6", *rows])


def _rps_names(game: Any, agent: str, legal: Sequence[int]) -> list[str]:
    return [game._moves[action].capitalize() for action in legal]


def _rps(game: Any, agent: str, observation: Any) -> str:
    last = "None yet" if observation == game._none else game._moves[int(observation)].capitalize()
    return f"Round {min(game.num_moves + 1, game.max_cycles)} of {game.max_cycles}. The other's last move: {last}."


def _raw(game: Any, agent: str) -> Mapping[str, Any]:
    raw: Mapping[str, Any] = game.env.get_state(game._name_to_int(agent))["raw_obs"]
    return raw


def _cards(cards: Any) -> str:
    """Name cards as `SQ`: suit, then rank."""
    if cards is None or len(cards) == 0:
        return "none yet"
    return cards if isinstance(cards, str) else " ".join(cards)


def _leduc(game: Any, agent: str, observation: Any) -> str:
    raw = _raw(game, agent)
    chips = ", ".join(map(str, raw["all_chips"]))
    return (
        f"Your card: {_cards(raw['hand'])}\nPublic card: {_cards(raw['public_card'])}\n"
        f"Your chips in the pot: {raw['my_chips']} (of all players: {chips})"
    )


def _holdem(game: Any, agent: str, observation: Any) -> str:
    raw = _raw(game, agent)
    chips = ", ".join(map(str, raw["all_chips"]))
    return (
        f"Your cards: {_cards(raw['hand'])}\nPublic cards: {_cards(raw['public_cards'])}\n"
        f"Your chips in the pot: {raw['my_chips']} (of all players: {chips})"
    )


def _chess_names(game: Any, agent: str, legal: Sequence[int]) -> list[str]:
    utils = import_extra("pettingzoo.classic.chess.chess_utils", "pettingzoo")
    player = game.possible_agents.index(agent)
    return [utils.action_to_move(game.board, action, player).uci() for action in legal]


def _chess(game: Any, agent: str, observation: Any) -> str:
    colour = "white (upper case)" if game.possible_agents.index(agent) == 0 else "black (lower case)"
    rows = [f"{8 - number} {row}" for number, row in enumerate(str(game.board).split("\n"))]
    return "\n".join([*rows, "  a b c d e f g h", f"You play {colour}."])


def _go_names(game: Any, agent: str, legal: Sequence[int]) -> list[str]:
    size = game._N
    return ["pass" if action == size * size else f"{action // size} {action % size}" for action in legal]


def _go(game: Any, agent: str, observation: Any) -> str:
    rows = _planes(observation, lambda row, column: ".")
    header = "   " + " ".join(f"{column:2}" for column in range(len(rows)))
    return "\n".join(
        [header, *(f"{number:2} " + " ".join(f" {cell}" for cell in row) for number, row in enumerate(rows))]
    )


_POKER = (
    "The pot goes to who has the better cards in the end, or to who is left when the other folds. Call to go on, raise "
    "to put in more, check to put in nothing where that is allowed, fold to give up. Cards are named by suit and rank."
)

SHEETS: Mapping[str, GameSheet] = MappingProxyType(
    {
        "tictactoe_v3": GameSheet(
            "You play tic-tac-toe: three of your marks (X) in a row, a column or a diagonal win. Free squares show "
            "their numbers.",
            *("the number of a free square", "4", _numbers, _tictactoe),
        ),
        "connect_four_v3": GameSheet(
            "You play Connect Four: a piece that is dropped into a column falls to its lowest free place; four of your "
            "pieces (X) in a row, a column or a diagonal win.",
            *("the number of a column", "3", _numbers, _connect_four),
        ),
        "rps_v2": GameSheet(
            "You play rock, paper, scissors over several rounds: rock beats scissors, scissors beat paper, paper beats "
            "rock. Both choose before either sees the other's move.",
            *("the name of a move", "Rock", _rps_names, _rps),
        ),
        "leduc_holdem_v4": GameSheet(
            "You play Leduc poker with two jacks, two queens and two kings: one card each, two rounds, and a public "
            f"card after the first; a pair with it wins, else the higher card. {_POKER}",
            *("Call, Raise, Fold or Check", "Call", _listed("Call", "Raise", "Fold", "Check"), _leduc),
        ),
        "texas_holdem_v4": GameSheet(
            f"You play Texas Hold'em with limits: two cards of your own and five public ones. {_POKER}",
            *("Call, Raise, Fold or Check", "Call", _listed("Call", "Raise", "Fold", "Check"), _holdem),
        ),
        "texas_holdem_no_limit_v6": GameSheet(
            f"You play Texas Hold'em without limits: two cards of your own and five public ones. {_POKER}",
            "Fold, Call (or check), Raise half pot, Raise pot or All in",
            "Call",
            _listed("Fold", "Call", "Raise half pot", "Raise pot", "All in"),
            _holdem,
        ),
        "chess_v6": GameSheet(
            "You play chess. White moves first.",
            *("a move from square to square, as e2e4 or e7e8q", "e2e4", _chess_names, _chess),
        ),
        "go_v5": GameSheet(
            "You play Go on the board that is drawn: X is you, O the other; stones without liberties are taken, and "
            "who has more area in the end wins.",
            *("row and column, or pass", "3 3", _go_names, _go),
        ),
    }
)
"""The games by the names of their modules."""

_MOST_LISTED = 40


class PettingZooAdapter(SeatedGame[int]):
    """A classic game of PettingZoo in text; needs the extra `pettingzoo`. Other kwargs are the game's own.

    Raises:
        ValueError: If an argument makes no sense.
        MissingExtraError: If PettingZoo, or what the game needs, is not installed.
    """

    metadata: dict[str, Any] = SeatedGame.metadata | {
        "description": "A classic game of PettingZoo, played in text.",
        "max_episode_steps": 1_000,
    }

    def __init__(
        self,
        game: Annotated[
            str,
            OneOf(*SHEETS),
            OPERATOR,
            Field(description="The name of its module, such as `tictactoe_v3`."),
        ],
        *,
        opponent: OpponentName = "self",
        seat: Seat = None,
        max_episode_steps: StepLimit = 1000,
        profile: ProfileName = "native",
        format_penalty: FormatPenalty = None,
        max_actions_per_turn: ActionsPerTurn = 1,
        render_mode: RenderMode = None,
        **kwargs: Any,
    ) -> None:
        if game not in SHEETS:
            raise ValueError(f"game must be one of {', '.join(SHEETS)}, not {game!r}")
        self._sheet = SHEETS[game]
        self._env = import_extra(f"pettingzoo.classic.{game}", "pettingzoo").env(**kwargs)
        super().__init__(
            self._sheet.form,
            self._sheet.example,
            self._env.possible_agents,
            opponent=opponent,
            seat=seat,
            max_episode_steps=max_episode_steps,
            profile=profile,
            format_penalty=format_penalty,
            max_actions_per_turn=max_actions_per_turn,
            render_mode=render_mode,
        )
        self._gained: dict[str, float] = {}
        self._legal: dict[str, int] = {}
        self._last_actor = self._seats[0]

    def close(self) -> None:
        """Close the PettingZoo game behind the adapter."""
        self._env.close()

    def _start(self, seed: int) -> None:
        self._env.reset(seed=seed)
        self._gained = dict.fromkeys(self._seats, 0.0)
        self._look()

    def _acting(self) -> str | None:
        ended = zip(self._env.terminations.values(), self._env.truncations.values(), strict=True)
        over = all(terminated or truncated for terminated, truncated in ended)
        return None if over else str(self._env.agent_selection)

    def _cut(self) -> bool:
        return any(self._env.truncations.values()) and not any(self._env.terminations.values())

    def _act(self, action: int) -> None:
        self._last_actor = str(self._env.agent_selection)
        self._env.step(action)
        for agent, reward in self._env.rewards.items():
            self._gained[agent] += float(reward)
        self._look()

    def _look(self) -> None:
        """Note what can be done now."""
        agent = self._acting()
        self._legal = {}
        if agent is not None:
            observation = self._env.observe(agent)
            mask = observation["action_mask"] if isinstance(observation, Mapping) else None
            actions = range(int(self._env.action_space(agent).n))
            legal = [action for action in actions if mask is None or mask[action]]
            names = self._sheet.names(self._env.unwrapped, agent, legal)
            self._legal = dict(zip(names, legal, strict=True))

    def _scores(self) -> Mapping[str, float]:
        return self._gained

    def _view(self) -> str:
        agent = self._acting() or self._seat or self._last_actor
        return self._sheet.view(self._env.unwrapped, agent, self._env.observe(agent))

    def parse_action(self, text: str) -> int | Refusal:
        word = " ".join(bare_word(text).replace(",", " ").split())
        for name, action in self._legal.items():
            if name.lower() == word:
                return action
        names = ", ".join(list(self._legal)[:_MOST_LISTED])
        return Refusal(f"Legal are: {names}{', ...' if len(self._legal) > _MOST_LISTED else ''}.")

    def available_actions(self) -> list[str]:
        return list(self._legal)

    def describe_action(self, action: int) -> str:
        return next((name for name, number in self._legal.items() if number == action), str(action))

    def describe_rules(self) -> str:
        return self._sheet.rules
