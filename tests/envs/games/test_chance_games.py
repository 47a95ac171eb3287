"""Game2048, Blackjack and Bandit: rules exactly as those of others, chances as promised."""

from itertools import chain

import gymnasium
import pytest
from gymnasium.envs.toy_text import blackjack as gymnasium_blackjack
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.envs.games.bandit import BanditEnv
from rollgym.envs.games.blackjack import ACTIONS, DECK, BlackjackEnv
from rollgym.envs.games.game_2048 import Game2048Env, merge, slide

# -- Game2048 ----------------------------------------------------------------------------------------------------------


def naive_left(line):
    """Move tile by tile to the left, as the rules are told: merge with an equal neighbour that no merge has made."""
    line, made = list(line), [False] * len(line)
    points = 0
    for start in range(1, len(line)):
        place = start
        while place and line[place] and line[place - 1] == 0:
            line[place - 1], line[place] = line[place], 0
            place -= 1
        if place and line[place] and line[place - 1] == line[place] and not made[place - 1]:
            line[place - 1], line[place] = 2 * line[place], 0
            made[place - 1] = True
            points += line[place - 1]
    return tuple(line), points


def turned(grid):
    """A quarter to the left."""
    return tuple(zip(*(row[::-1] for row in grid), strict=True))


# Up, Down, Left, Right: how often to turn to the left so that the move goes to the left.
TURNS = (1, 3, 0, 2)

tiles = st.sampled_from([0, 0, 2, 2, 4, 8])
grids = st.integers(2, 4).flatmap(
    lambda size: st.lists(st.tuples(*[tiles] * size), min_size=size, max_size=size).map(tuple)
)


@given(grid=grids, action=st.integers(0, 3))
def test_moves_are_those_of_an_independent_implementation(grid, action):
    there = grid
    for _ in range(TURNS[action]):
        there = turned(there)
    moved = [naive_left(row) for row in there]
    back = tuple(row for row, _ in moved)
    for _ in range((4 - TURNS[action]) % 4):
        back = turned(back)
    assert slide(grid, action) == (back, sum(points for _, points in moved))


@pytest.mark.parametrize(
    ("line", "merged", "points"),
    [
        ((2, 2, 2, 2), (4, 4, 0, 0), 8),
        ((2, 2, 2, 0), (4, 2, 0, 0), 4),
        ((4, 2, 2, 0), (4, 4, 0, 0), 4),
        ((2, 0, 0, 2), (4, 0, 0, 0), 4),
        ((0, 0, 0, 2), (2, 0, 0, 0), 0),
        ((2, 4, 2, 4), (2, 4, 2, 4), 0),
    ],
)
def test_each_tile_merges_at_most_once_a_move(line, merged, points):
    assert merge(line) == (merged, points)


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_a_game_follows_the_moves_adds_one_tile_and_ends_when_none_can_move(seed):
    environment = Game2048Env(size=3)
    _, info = environment.reset(seed=seed)
    assert sum(tile > 0 for row in info["state"]["rows"] for tile in row) == 2
    total, terminated = 0.0, False
    while not terminated:
        before = tuple(map(tuple, info["state"]["rows"]))
        action = info["available_actions"][-1]
        _, reward, terminated, truncated, info = environment.step(action)
        expected, points = slide(before, ("Up", "Down", "Left", "Right").index(action))
        assert reward == points
        changed = [
            (old, new)
            for old, new in zip(chain(*expected), chain(*info["state"]["rows"]), strict=True)
            if old != new
        ]
        assert changed in ([(0, 2)], [(0, 4)])
        total += reward
        assert not truncated
    assert info["available_actions"] == []
    assert info["metrics"]["largest_tile"] == max(map(max, info["state"]["rows"]))


def test_a_move_that_moves_nothing_is_none():
    environment = Game2048Env(size=2)
    environment.reset(seed=0)
    environment._grid = ((2, 4), (0, 0))
    text, reward, *_, info = environment.step("Up")
    assert (reward, info["action_is_valid"], info["available_actions"]) == (0.0, False, ["Down"])
    assert "No tile can move up." in text


def test_the_target_ends_the_game():
    environment = Game2048Env(target=8)
    environment.reset(seed=0)
    environment._grid = ((4, 4, 0, 0), (0,) * 4, (0,) * 4, (0,) * 4)
    _, reward, terminated, _, info = environment.step("Left")
    assert (reward, terminated, info["success"]) == (8.0, True, True)


# -- Blackjack ---------------------------------------------------------------------------------------------------------


class CardsInOrder(BlackjackEnv):
    """Blackjack with given cards."""

    def __init__(self, cards, **kwargs):
        super().__init__(**kwargs)
        self._cards = iter(cards)

    def _card(self):
        return next(self._cards)


@settings(max_examples=200)
@given(
    cards=st.lists(st.sampled_from(DECK), min_size=40, max_size=40),
    naturals=st.lists(st.booleans(), min_size=2, max_size=2),
    moves=st.lists(st.integers(0, 1), max_size=10),
    natural=st.booleans(),
    sab=st.booleans(),
)
def test_hands_are_gymnasiums_given_the_same_cards(cards, naturals, moves, natural, sab):
    # Random cards are seldom naturals, whose rules are what differs: deal some on purpose.
    for start, dealt in zip((0, 2), naturals, strict=True):
        cards[start : start + 2] = [1, 10] if dealt else cards[start : start + 2]
    ours = CardsInOrder(cards, natural=natural, sab=sab)
    ours.reset(seed=0)
    theirs = gymnasium_blackjack.BlackjackEnv(natural=natural, sab=sab)
    rest = iter(cards)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gymnasium_blackjack, "draw_card", lambda generator: next(rest))
        theirs.reset(seed=0)
        for move in [*moves, 0]:
            assert (ours._player, ours._dealer) == (theirs.player, theirs.dealer)
            _, reward, terminated, _, info = ours.step(ACTIONS[1 - move])
            observation, expected, over, _, _ = theirs.step(move)
            assert (reward, terminated, info["state"]["sum"]) == (expected, over, observation[0])
            assert info["success"] == (reward > 0)
            if over:
                break


def test_the_rules_are_those_of_the_registered_environment():
    registered = gymnasium.spec("Blackjack-v1").kwargs
    ours = BlackjackEnv()
    assert registered == {"sab": ours._sab, "natural": ours._natural}


def test_the_dealers_hidden_card_is_shown_at_the_end_only():
    environment = CardsInOrder([9, 7, 10, 8, 2])
    text, info = environment.reset(seed=0)
    assert text == "Your cards: 10, 8 (sum 18)\nThe dealer's open card: 9"
    assert info["state"]["dealer"] == [9]
    text, reward, *_, info = environment.step("Stick")
    assert (reward, info["state"]["dealer"]) == (0.0, [9, 7, 2])
    assert "The dealer's cards: 9, 7, 2 (sum 18)" in text


def test_an_ace_is_soft_until_it_must_not_be():
    environment = CardsInOrder([10, 10, 1, 6, 9])
    text, _ = environment.reset(seed=0)
    assert "A, 6 (sum 17, an ace counts 11)" in text
    assert "A, 6, 9 (sum 16)" in environment.step("Hit")[0]


# Figure 5.2 of Sutton and Barto: the greatest sum with which one hits, by the dealer's open card.
HARD = {1: 16, 2: 12, 3: 12, **dict.fromkeys((4, 5, 6), 11), **dict.fromkeys((7, 8, 9, 10), 16)}
SOFT = {**dict.fromkeys(range(2, 9), 17), 9: 18, 10: 18, 1: 18}


@pytest.mark.parametrize("dealer", range(1, 11))
def test_the_expert_plays_the_published_optimal_policy(dealer):
    for total in range(12, 21):
        for hand, most in (([10, total - 10], HARD[dealer]), ([1, total - 11], SOFT[dealer])):
            if hand[1] > 1:
                _, info = CardsInOrder([dealer, 5, *hand]).reset(options={"expert": True})
                assert info["state"]["sum"] == total
                assert info["expert_action"] == ("Hit" if total <= most else "Stick")


# -- Bandit ------------------------------------------------------------------------------------------------------------


def test_arms_pay_what_they_promise():
    environment = BanditEnv(arms=3, pulls=400, max_episode_steps=400)
    for seed in range(3):
        environment.reset(seed=seed)
        arm = environment._arms[1]
        paid = [environment.step("Dragon")[1] for _ in range(400)]
        assert set(paid) <= {0.0, arm.prize}
        share = sum(amount > 0 for amount in paid) / 400
        # Four standard deviations of a share of 400 pulls.
        assert abs(share - arm.chance) <= 4 * (arm.chance * (1 - arm.chance) / 400) ** 0.5


@given(seed=st.integers(0, 10**6), arms=st.integers(2, 8))
@settings(max_examples=40)
def test_the_best_arm_is_ahead_and_its_story_true(seed, arms):
    environment = BanditEnv(arms=arms)
    _, info = environment.reset(seed=seed)
    means = [arm.mean for arm in environment._arms]
    best = means.pop(environment.optimal_arm)
    assert 0.65 < best < 1.05
    assert max(means) < 0.56
    for arm in environment._arms:
        word = {1.0: "steady", 0.5: "moody", 0.25: "wild", 0.1: "a dreamer"}[arm.chance]
        assert f"{arm.name} is {word}" in info["instruction"]


def test_success_is_to_pull_the_best_arm_most_of_the_time():
    environment = BanditEnv(arms=2, pulls=4)
    for good, success in ((2, False), (3, True)):
        _, info = environment.reset(seed=0, options={"expert": True})
        best = info["expert_action"]
        other = next(name for name in info["available_actions"] if name != best)
        for name in [best] * good + [other] * (4 - good):
            *_, terminated, truncated, info = environment.step(name)
        assert (terminated, truncated, info["success"]) == (True, False, success)
        assert (info["metrics"]["regret"] > 0) == (good < 4)
