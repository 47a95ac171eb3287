"""Instructions for language models on PettingZoo's classic games, whose observations are planes of numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

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
