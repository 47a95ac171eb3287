"""PettingZoo and TextArena through our adapters: the same games, one turn after another."""

import importlib
import random

import httpx
import pytest
from gymnasium.utils import seeding
from gymnasium.utils.env_checker import check_env

from rollgym.clients.checks.trace import trace
from rollgym.clients.client.env import RemoteEnv
from rollgym.envs.adapters.pettingzoo import SHEETS, PettingZooAdapter
from rollgym.envs.adapters.textarena import TextArenaAdapter
from rollgym.extras import MissingExtraError, import_extra
from tests.support.processes import ROOT
from tests.support.wire import Server

pytest.importorskip("pettingzoo", reason="the extra `pettingzoo` is not installed")
pytest.importorskip("textarena", reason="the extra `textarena` is not installed")

ARENA = ("TicTacToe-v0", "KuhnPoker-v0", "TowerOfHanoi-v0")


def play(environment, seed, choose):
    """An episode, as (player, action, reward, rewards of all), and its last info."""
    _, info = environment.reset(seed=seed)
    steps, over = [], False
    while not over:
        actor, action = info["agent"], choose(info)
        _, reward, terminated, truncated, info = environment.step(action)
        steps.append((actor, action, reward, info["rewards"]))
        over = terminated or truncated
    return steps, info


def at_random(seed):
    draw = random.Random(seed)
    return lambda info: draw.choice(info["available_actions"])


# -- PettingZoo --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("game", [game for game in SHEETS if game != "go_v5"])
def test_the_game_is_pettingzoos_step_by_step(game):
    """The same actions, played on the bare environment by the names' numbers, give the same turns and rewards."""
    ours = PettingZooAdapter(game, max_episode_steps=60)
    bare = importlib.import_module(f"pettingzoo.classic.{game}").env()
    for seed in range(3):
        choose = at_random(seed)
        _, info = ours.reset(seed=seed)
        # The adapter's game has the first number that the adapter draws as its seed.
        bare.reset(seed=int(seeding.np_random(seed)[0].integers(2**31)))
        totals = dict.fromkeys(bare.possible_agents, 0.0)
        over = False
        while not over:
            assert info["agent"] == bare.agent_selection
            action = choose(info)
            number = ours._legal[action]
            if isinstance(bare.observe(bare.agent_selection), dict):
                mask = bare.observe(bare.agent_selection)["action_mask"]
                assert sum(mask) == len(info["available_actions"])
                assert mask[number]
            _, _, terminated, truncated, info = ours.step(action)
            bare.step(number)
            for agent, reward in bare.rewards.items():
                totals[agent] += reward
            assert info["rewards"] == bare.rewards
            over = terminated or truncated
        assert ours._scores() == totals


def test_who_wins_is_paid_and_the_loser_is_told():
    environment = PettingZooAdapter("tictactoe_v3")
    script = iter("03142")
    steps, info = play(environment, 0, lambda info: next(script))
    assert [actor for actor, *_ in steps] == ["player_1", "player_2"] * 2 + ["player_1"]
    assert steps[-1] == ("player_1", "2", 1.0, {"player_1": 1.0, "player_2": -1.0})
    assert (info["success"], info["agent"]) == (True, None)


def test_the_board_shows_who_is_to_move():
    environment = PettingZooAdapter("tictactoe_v3")
    environment.reset(seed=0)
    text, *_ = environment.step("3")
    assert text == "0 O 6\n1 4 7\n2 5 8\nIt is your turn as player_2."
    text, *_, info = environment.step("3")
    assert (info["action_is_valid"], info["agent"]) == (False, "player_2")
    assert "Legal are: 0, 1, 2, 4" in text


@pytest.mark.parametrize("seat", [0, 1])
def test_against_an_opponent_one_seat_is_played(seat):
    environment = PettingZooAdapter("connect_four_v3", opponent="random", seat=seat)
    won = 0
    for seed in range(10):
        steps, info = play(environment, seed, lambda info: info["available_actions"][0])
        assert {actor for actor, *_ in steps} == {f"player_{seat}"} == {info["state"]["seat"]}
        assert sum(reward for _, _, reward, _ in steps) == sum(each[f"player_{seat}"] for *_, each in steps)
        assert info["success"] == (steps[-1][2] > 0)
        won += info["success"]
    # Four in one column, without looking, against random play.
    assert won >= 5


def test_seats_are_drawn_by_the_seed():
    environment = PettingZooAdapter("tictactoe_v3", opponent="random")
    seats = [environment.reset(seed=seed)[1]["state"]["seat"] for seed in range(20)]
    assert set(seats) == {"player_1", "player_2"}
    assert seats == [environment.reset(seed=seed)[1]["state"]["seat"] for seed in range(20)]


def test_there_is_always_something_left_to_play():
    """In poker a random opponent often folds before the policy has had a turn."""
    environment = PettingZooAdapter("leduc_holdem_v4", opponent="random", seat=1)
    assert {environment.reset(seed=seed)[1]["agent"] for seed in range(30)} == {"player_1"}
    folding = PettingZooAdapter("leduc_holdem_v4", opponent=lambda text, actions, draw: "Fold", seat=1)
    # Who begins is dealt; with the other seat first there is a turn.
    assert {folding.reset(seed=seed)[1]["agent"] for seed in range(10)} == {"player_1"}


def test_an_opponent_may_be_any_callable():
    environment = PettingZooAdapter("tictactoe_v3", opponent=lambda text, actions, draw: actions[-1], seat=0)
    environment.reset(seed=0)
    *_, info = environment.step("0")
    assert info["state"]["history"] == [["player_1", "0"], ["player_2", "8"]]


def test_moves_of_a_round_are_hidden_until_both_have_chosen():
    environment = PettingZooAdapter("rps_v2", max_cycles=2)
    environment.reset(seed=0)
    text, *_ = environment.step("Rock")
    assert "last move: None yet" in text
    text, reward, *_, info = environment.step("Paper")
    assert (reward, info["rewards"]) == (1.0, {"player_0": -1.0, "player_1": 1.0})
    assert "Round 2 of 2. The other's last move: Paper." in text
    # What the other's move has cost is paid with the next one of one's own.
    assert environment.step("Rock")[1] == -1.0
    _, _, terminated, truncated, info = environment.step("Rock")
    assert (terminated, truncated) == (False, True)


# -- TextArena ---------------------------------------------------------------------------------------------------------


def test_the_arenas_words_reach_the_player_once():
    environment = TextArenaAdapter("TicTacToe-v0", opponent="random", seat=0)
    text, info = environment.reset(seed=1)
    assert "You are Player 0 in Tic Tac Toe" in text
    assert info["available_actions"] == [f"[{square}]" for square in range(9)]
    text, *_, info = environment.step("4")
    assert "You are Player 0" not in text
    assert "[Player 0] [4]" in text
    assert info["state"]["history"][0] == ["Player 0", "[4]"]
    assert len(info["available_actions"]) == 7


def test_in_self_play_each_player_sees_all_of_their_own_and_nothing_of_the_others():
    environment = TextArenaAdapter("KuhnPoker-v0")
    for seed in range(5):
        text, info = environment.reset(seed=seed)
        for _ in range(4):
            assert f"You are {info['agent']} in a" in text
            other = {"Player 0": "Player 1", "Player 1": "Player 0"}[info["agent"]]
            assert f"You are {other}" not in text
            text, _, terminated, _, info = environment.step(info["available_actions"][0])
            if terminated:
                break


def test_an_invalid_move_is_told_and_the_second_one_loses():
    environment = TextArenaAdapter("TicTacToe-v0")
    environment.reset(seed=0)
    text, reward, terminated, _, info = environment.step("[9]")
    assert (reward, terminated, info["action_is_valid"], info["agent"]) == (0.0, False, False, "Player 0")
    assert "attempted an invalid move" in text
    _, reward, terminated, _, info = environment.step("[9]")
    assert (reward, terminated, info["action_is_valid"], info["success"]) == (-1.0, True, False, False)
    assert info["rewards"] == {"Player 0": -1.0, "Player 1": 1.0}


def test_a_puzzle_for_one_is_solved():
    environment = TextArenaAdapter("TowerOfHanoi-v0")
    environment.reset(seed=0)
    for move in ("A C", "A B", "C B", "A C", "B A", "B C"):
        assert not environment.step(move)[2]
    _, reward, terminated, _, info = environment.step("[A C]")
    assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_games_draw_from_a_state_of_their_own():
    """The arena draws from the global generators: two games at once, and we, must not disturb each other."""
    alone = [TextArenaAdapter("KuhnPoker-v0").reset(seed=seed)[0] for seed in (1, 2)]
    first, second = TextArenaAdapter("KuhnPoker-v0"), TextArenaAdapter("KuhnPoker-v0")
    random.seed(99)
    expected = random.Random(99).random()
    texts = [first.reset(seed=1)[0], second.reset(seed=2)[0]]
    assert texts == alone
    assert random.random() == expected
    moves = [play(TextArenaAdapter("KuhnPoker-v0"), 1, at_random(0)) for _ in range(2)]
    assert moves[0] == moves[1]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"game": "TicTacTo-v0"}, "near: TicTacToe-v0"),
        ({"game": "TicTacToe-v0", "players": 5}, "takes no 5 players"),
        ({"game": "TicTacToe-v0", "seat": 1}, "seat is for play against"),
        ({"game": "TowerOfHanoi-v0", "opponent": "random"}, "is for one player"),
        ({"game": "TicTacToe-v0", "opponent": "minimax"}, "opponent must be 'self' or 'random'"),
    ],
)
def test_bad_kwargs_name_the_remedy(kwargs, message):
    with pytest.raises(ValueError, match=message):
        TextArenaAdapter(**kwargs)


def test_an_opponent_without_listed_moves_says_so():
    with pytest.raises(ValueError, match="does not list its actions"):
        TextArenaAdapter("Nim-v0", opponent="random", seat=1).reset(seed=0)


# -- served ------------------------------------------------------------------------------------------------------------


def test_the_example_is_served_and_forks():
    with Server("--config", str(ROOT / "examples" / "serving" / "self_play.yaml")) as server:
        remote = RemoteEnv(server.url, "KuhnPoker")
        bare = TextArenaAdapter("KuhnPoker-v0")
        assert remote.reset(seed=3)[0] == bare.reset(seed=3)[0]
        assert remote.step("[bet]")[0] == bare.step("[bet]")[0]
        remote.close()
        board = RemoteEnv(server.url, "TicTacToe", {"opponent": "random", "seat": 1})
        text, info = board.reset(seed=0)
        assert text.endswith("It is your turn as player_2.")
        assert info["state"]["history"][0][0] == "player_1"
        board.close()
        with httpx.Client(base_url=server.url) as client:
            refused = client.post("/v1/sessions", json={"env_id": "TicTacToe", "kwargs": {"game": "go_v5"}})
            assert refused.json()["code"] == "invalid_kwargs"


# -- both --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("game", ["tictactoe_v3", "leduc_holdem_v4", *ARENA])
def test_the_checker_is_content_and_seeds_are_kept(game):
    adapter = PettingZooAdapter if game in SHEETS else TextArenaAdapter
    check_env(adapter(game, render_mode="ansi"))
    assert trace(adapter(game)) == trace(adapter(game))


def test_a_missing_extra_is_named():
    with pytest.raises(MissingExtraError, match=r"pip install .*\[pettingzoo\]'"):
        import_extra("no_such_package.classic", "pettingzoo")
    with pytest.raises(ValueError, match="game must be one of"):
        PettingZooAdapter("hanabi_v5")
