"""Blackjack-v0: one hand against the dealer, by the rules of Gymnasium's Blackjack-v1."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Unpack

from pydantic import Field

from rollgym.envs.core.text_game import GameKwargs, Move, NamedGame, StepLimit

ACTIONS = ("Hit", "Stick")
_HIT = 0
# An infinite deck: tens, jacks, queens and kings count ten, aces one or eleven.
DECK = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10)
_DEALER_STANDS = 17


class BlackjackEnv(NamedGame):
    """Cards from an infinite deck; the dealer draws to 17. The defaults are those of the registered Blackjack-v1.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = NamedGame.metadata | {
        "description": "One hand of blackjack against the dealer.",
        "observation": "Your cards, and the dealer's card that is open.",
        "actions": "`Hit` or `Stick`.",
        "reward": "1 for a win, 0 for a draw, -1 for a loss; 1.5 for a natural where `natural` says so.",
        "max_episode_steps": 20,
        "baselines": {
            "random": [0.3, -0.38],
            "constant action": [0.4, -0.15],
            "echo of the instruction": [0, -0.38],
            "blind": [0.32, -0.28],
            "expert": [0.35, -0.13],
        },
    }

    def __init__(
        self,
        *,
        natural: Annotated[bool, Field(description="Whether a win with an ace and a ten pays 1.5.")] = False,
        sab: Annotated[
            bool,
            Field(
                description=(
                    "The rules of Sutton and Barto: a natural wins against all but another; `natural` "
                    "plays no part then."
                )
            ),
        ] = True,
        max_episode_steps: StepLimit = 20,
        **common: Unpack[GameKwargs],
    ) -> None:
        super().__init__(ACTIONS, max_episode_steps=max_episode_steps, **common)
        self._natural = natural
        self._sab = sab
        self._dealer: list[int] = [DECK[0]]
        self._player: list[int] = []
        self._result = ""

    def start_episode(self, options: Mapping[str, Any]) -> None:
        self._dealer = [self._card(), self._card()]
        self._player = [self._card(), self._card()]
        self._result = ""

    def _card(self) -> int:
        return int(self.np_random.choice(DECK))

    def apply_action(self, action: int) -> Move:
        if action == _HIT:
            self._player.append(self._card())
            bust = hand_sum(self._player) > 21
            self._result = "You are over 21 and lose." if bust else ""
            return Move(-1.0 if bust else 0.0, bust, False)
        while hand_sum(self._dealer) < _DEALER_STANDS:
            self._dealer.append(self._card())
        reward = self._payout()
        self._result = f"You {'win' if reward > 0 else 'lose' if reward < 0 else 'draw'}."
        return Move(reward, True, reward > 0)

    def _payout(self) -> float:
        mine, dealers = hand_sum(self._player), hand_sum(self._dealer)
        reward = 1.0 if dealers > 21 else float((mine > dealers) - (mine < dealers))
        if self._sab:
            return 1.0 if is_natural(self._player) and not is_natural(self._dealer) else reward
        return 1.5 if self._natural and reward == 1.0 and is_natural(self._player) else reward

    def draw_board(self) -> str:
        ace = ", an ace counts 11" if has_usable_ace(self._player) else ""
        lines = [f"Your cards: {_named(self._player)} (sum {hand_sum(self._player)}{ace})"]
        if not self._result:
            return "\n".join([*lines, f"The dealer's open card: {_named(self._dealer[:1])}"])
        dealt = f"The dealer's cards: {_named(self._dealer)} (sum {hand_sum(self._dealer)})"
        return "\n".join([*lines, dealt, self._result])

    def state_info(self) -> dict[str, Any]:
        # What the dealer hides stays hidden until the end.
        dealer = list(self._dealer) if self._result else self._dealer[:1]
        state = {"player": list(self._player), "dealer": dealer, "sum": hand_sum(self._player)}
        return {"anchor": f"{sorted(self._player)} {dealer}", "state": state}

    def describe_rules(self) -> str:
        return (
            "You play blackjack against the dealer, with an infinite deck. Cards count what they show, tens and faces "
            "(10) ten, aces (A) one or eleven. Hit for another card; over 21 you lose. Stick to end: the dealer then "
            "draws to 17 or more, and who is nearer to 21 wins."
        )

    def expert_action(self) -> int:
        cards = hand_sum(self._player), has_usable_ace(self._player)
        if cards[0] >= 21:
            return 1
        return _HIT if _hit_value(*cards, self._dealer[0]) > _stick_value(cards[0], self._dealer[0]) else 1


def has_usable_ace(hand: Sequence[int]) -> bool:
    """Return whether an ace counts eleven without going beyond 21."""
    return 1 in hand and sum(hand) + 10 <= 21


def hand_sum(hand: Sequence[int]) -> int:
    """Return the best sum of a hand."""
    return sum(hand) + 10 if has_usable_ace(hand) else sum(hand)


def is_natural(hand: Sequence[int]) -> bool:
    """Return whether a hand is an ace and a ten."""
    return sorted(hand) == [1, 10]


@cache
def _dealer_sums(total: int, ace: bool) -> Mapping[int, float]:
    """Return how probable the dealer's final sums are, from a hand of which only its sum is known."""
    if total >= _DEALER_STANDS:
        return {total: 1.0}
    chances: dict[int, float] = {}
    for card in DECK:
        for final, chance in _dealer_sums(*_with(total, ace, card)).items():
            chances[final] = chances.get(final, 0.0) + chance / len(DECK)
    return chances


def _with(total: int, ace: bool, card: int) -> tuple[int, bool]:
    """Return sum and usable ace after one more card."""
    total, ace = (total + 11, True) if card == 1 and total + 11 <= 21 else (total + card, ace)
    return (total - 10, False) if total > 21 and ace else (total, ace)


def _stick_value(total: int, dealer: int) -> float:
    sums = _dealer_sums(*_with(0, False, dealer))
    return sum(
        chance * (1 if final > 21 else (total > final) - (total < final)) for final, chance in sums.items()
    )


@cache
def _hit_value(total: int, ace: bool, dealer: int) -> float:
    """Return what to expect of one more card and the best play from then on."""
    value = 0.0
    for card in DECK:
        reached = _with(total, ace, card)
        if reached[0] > 21:
            value -= 1.0
        else:
            value += max(_stick_value(reached[0], dealer), _hit_value(*reached, dealer))
    return value / len(DECK)


def _named(hand: Sequence[int]) -> str:
    return ", ".join("A" if card == 1 else str(card) for card in hand)
