"""The text adapter: what it shows, and that nothing of the environment changes under it."""

import io
from unittest import mock

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from rollgym.clients.cli.main import main as roll_env
from rollgym.clients.client.env import RemoteEnv
from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.common.settings import ConfigurationError, ServerSettings
from rollgym.envs.adapters.text import DEFAULT_MAX_STEPS, TextAdapter
from rollgym.envs.adapters.text_spaces import ObservationText, plain_drawing
from tests.support.echo_env import Echo
from tests.support.processes import ROOT
from tests.support.wire import Server

LAKE = "FrozenLake-v1"
POLE = "CartPole-v1"


# -- the episode is the environment's own ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [LAKE, POLE, "Taxi-v4", "Blackjack-v1", "MountainCar-v0", "Acrobot-v1"])
def test_an_episode_is_that_of_the_bare_environment(name):
    bare, text = gymnasium.make(name), TextAdapter(name)
    names = text.reset(seed=0)[1]["available_actions"]
    generator = np.random.default_rng(1)
    for seed in range(3):
        expected, _ = bare.reset(seed=seed)
        _, info = text.reset(seed=seed)
        assert np.array_equal(info["state"]["observation"], expected)
        over = False
        while not over:
            number = int(generator.integers(bare.action_space.n))
            said = str(number) if number % 2 else text._actions.names[number]
            expected, reward, terminated, truncated, _ = bare.step(number)
            _, *outcome, info = text.step(f"<think>0</think><answer>{said}</answer>")
            assert outcome == [reward, terminated, truncated]
            assert np.array_equal(info["state"]["observation"], expected)
            over = terminated or truncated
    assert names


@pytest.mark.parametrize("name", ["CliffWalking-v1", "Pendulum-v1", "MountainCarContinuous-v0", LAKE, POLE])
def test_the_checker_is_content(name):
    check_env(TextAdapter(name))
    check_env(TextAdapter(name, profile="ragen", max_actions_per_turn=2, render_mode="ansi"))


def test_roll_env_check_passes():
    with mock.patch("sys.stdout", io.StringIO()) as printed:
        code = roll_env(["check", "rollgym.envs.adapters.text:TextAdapter", "--kwarg", f"env={LAKE}"])
    assert code == 0, printed.getvalue()
    assert "0 failed, 0 warned" in printed.getvalue()


def test_play_offers_it(capsys):
    with mock.patch("sys.stdin", io.StringIO("left\nnonsense\n:quit\n")):
        assert roll_env(["play", POLE, "--gymnasium-text", POLE, "--seed", "3"]) == 0
    shown = capsys.readouterr().out
    assert "pole angle (radians): " in shown
    assert "Invalid action." in shown


def test_a_seed_in_the_middle_reaches_the_environment():
    one, other = TextAdapter(LAKE), TextAdapter(LAKE)
    one.reset(seed=1)
    other.reset(seed=2)
    for each in (one, other):
        each.reseed(5)
    assert [one.step("Right")[0] for _ in range(9)] == [other.step("Right")[0] for _ in range(9)]


# -- observations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "observation", "names", "text"),
    [
        (spaces.Discrete(3, start=1), 2, None, "2"),
        (spaces.Discrete(3, start=1), 2, ["red", "green", "blue"], "green"),
        (spaces.Box(-1, 1, (2,)), np.array([0.123456, -0.0], np.float32), None, "[0.1235, 0]"),
        (spaces.Box(-1, 1, (2,)), np.array([0.5, 1.0], np.float32), ["x", "y"], "x: 0.5\ny: 1"),
        (spaces.Box(0, 9, (2, 2), np.int8), np.array([[1, 2], [3, 4]], np.int8), None, "[1, 2]\n[3, 4]"),
        (spaces.Box(0, 1, ()), np.array(0.5, np.float32), None, "0.5"),
        (spaces.MultiBinary(2), np.array([0, 1], np.int8), None, "[0, 1]"),
        (spaces.Tuple([spaces.Discrete(9), spaces.Text(9)]), (3, "hi"), None, "1: 3\n2: hi"),
        (spaces.Tuple([spaces.Discrete(9), spaces.Text(9)]), (3, "hi"), ["a", "b"], "a: 3\nb: hi"),
        (
            spaces.Dict(board=spaces.Box(0, 9, (2, 1), np.int8), turn=spaces.Discrete(2)),
            {"board": np.array([[1], [2]], np.int8), "turn": 1},
            None,
            "board:\n  [1]\n  [2]\nturn: 1",
        ),
        (spaces.Sequence(spaces.Discrete(9)), (4, 5), None, "1: 4\n2: 5"),
        (spaces.Sequence(spaces.Discrete(9), stack=True), np.array([4, 5]), None, "1: 4\n2: 5"),
        (spaces.Sequence(spaces.Discrete(9)), (), None, "nothing"),
    ],
)
def test_observations(space, observation, names, text):
    assert ObservationText(space, names).write(observation) == text


def test_precision():
    space = spaces.Box(-1, 1, (1,), np.float64)
    assert ObservationText(space, None, 6).write(np.array([1 / 3])) == "[0.333333]"


def test_colours_that_carry_meaning_stay():
    assert plain_drawing("  (Left)\n\x1b[41mS\x1b[0mFF\nF\x1b[34;1mY\x1b[0mH \n") == "  (Left)\n[S]FF\nF(Y)H"
    assert plain_drawing("\x1b[7m@") == "[@]"
    assert plain_drawing("\x1b[0;1mplain\x1b[0m") == "plain"


def test_the_lake_is_drawn_and_the_choice_is_the_clients():
    shown, info = TextAdapter(LAKE).reset(seed=0)
    assert shown == "[S]FFF\nFHFH\nFFFH\nHFFG\n\nyour cell: 0"
    assert info["anchor"] == "0"
    assert TextAdapter(LAKE, show="render").reset(seed=0)[0] == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert TextAdapter(LAKE, show="observation").reset(seed=0)[0] == "your cell: 0"
    assert TextAdapter(LAKE, show="observation", observation_names=[f"at {n}" for n in range(16)]).reset(
        seed=0
    )[0] == ("at 0")


def test_people_see_the_drawing():
    adapter = TextAdapter(LAKE, render_mode="ansi")
    adapter.reset(seed=0)
    assert adapter.render() == "\n\x1b[41mS\x1b[0mFFF\nFHFH\nFFFH\nHFFG\n"
    pole = TextAdapter(POLE, render_mode="ansi")
    assert pole.reset(seed=0)[0] == pole.render()
    assert pole.metadata["render_modes"] == ["ansi", "rgb_array"]
    assert TextAdapter(POLE).render() is None


def test_profiles_frame_the_observation():
    adapter = TextAdapter(POLE, profile="gem")
    shown, info = adapter.reset(seed=0)
    assert shown.startswith("cart position: ")
    assert shown.endswith("one of: Left, Right.")
    assert info["instruction"].endswith(r"\boxed{Left}")
    adapter = TextAdapter(POLE, profile="ragen")
    assert "You have 500 actions left." in adapter.reset(seed=0)[0]
    assert "You have 499 actions left." in adapter.step("<answer>Left</answer>")[0]


# -- info --------------------------------------------------------------------------------------------------------------


def test_an_instruction_says_what_to_do_and_how_to_answer():
    instruction = TextAdapter(POLE).reset(seed=0)[1]["instruction"]
    assert "pole" in instruction
    assert "Actions: Left, Right." in instruction
    assert "<answer>Left</answer>" in instruction
    mine = TextAdapter(POLE, instruction="Balance.", actions=["L", "R"]).reset(seed=0)[1]["instruction"]
    assert mine == "Balance. Actions: L, R. Reply with the action in this form: <answer>L</answer>"
    unknown = TextAdapter(Echo(spaces.Discrete(2))).reset(seed=0)[1]["instruction"]
    assert unknown.startswith("You act in Echo. Actions: 0, 1.")


def test_a_mask_narrows_what_is_available():
    names = ("South", "North", "East", "West", "Pickup", "Dropoff")
    adapter = TextAdapter("Taxi-v4")
    for seed in range(5):
        info = adapter.reset(seed=seed)[1]
        allowed = [name for name, here in zip(names, info["action_mask"], strict=True) if here]
        assert info["available_actions"] == allowed


def solved(adapter, *replies):
    adapter.reset(seed=0)
    return [adapter.step(reply)[4]["success"] for reply in replies]


def test_success_is_the_return_that_the_registration_names():
    safe = ["Down", "Down", "Right", "Right", "Down", "Right"]
    assert solved(TextAdapter(LAKE, is_slippery=False), *safe) == [False] * 5 + [True]
    assert solved(TextAdapter(LAKE, is_slippery=False), "Right", "Down") == [False, False]
    assert solved(TextAdapter(POLE, success=3, max_episode_steps=3), "0", "1", "0") == [False, False, True]
    assert not any(solved(TextAdapter(POLE, success=3, max_episode_steps=3), "0", "?", "0"))


def test_success_may_be_the_end():
    cliff = ["Up", *["Right"] * 11, "Down"]
    assert solved(TextAdapter("CliffWalking-v1"), *cliff) == [False] * 12 + [True]
    assert not any(solved(TextAdapter("CliffWalking-v1", max_episode_steps=2), "Up", "Up"))


def test_unreadable_replies_do_not_succeed_where_steps_cost():
    adapter = TextAdapter(Echo(spaces.Discrete(2)), success=-5.0, max_episode_steps=2)
    assert solved(adapter, "?", "?") == [False, False]


def test_what_the_environment_says_of_success_goes_before():
    assert solved(TextAdapter(Echo(spaces.Discrete(2), is_success=True)), "0") == [True]
    info = TextAdapter(Echo(spaces.Discrete(2), metrics={"coins": 2}, note="x")).reset(seed=0)[1]
    assert info["metrics"] == {"coins": 2, "steps": 0, "invalid_replies": 0}
    assert info["note"] == "x"


def test_anchors_are_for_states_that_are_seen():
    assert "anchor" not in TextAdapter("Blackjack-v1").reset(seed=0)[1]
    assert "anchor" not in TextAdapter(Echo(spaces.Discrete(2))).reset(seed=0)[1]
    assert TextAdapter(Echo(spaces.Discrete(2)), fully_observed=True).reset(seed=0)[1]["anchor"] == "0"


def test_an_environment_without_a_limit_gets_one():
    adapter = TextAdapter("Blackjack-v1")
    adapter.reset(seed=0)
    ends = [adapter.step("?")[3] for _ in range(DEFAULT_MAX_STEPS)]
    assert ends == [False] * (DEFAULT_MAX_STEPS - 1) + [True]


def test_the_limit_may_be_longer_than_the_registration_says():
    adapter = TextAdapter("MountainCar-v0", max_episode_steps=300)
    adapter.reset(seed=0)
    assert sum(not adapter.step("Coast")[3] for _ in range(300)) == 299


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TextAdapter(LAKE, actions=["a", "b"]), "has 4 actions, but 2 are named"),
        (lambda: TextAdapter(LAKE, actions=["a", "b", "c", "a"]), "same name"),
        (lambda: TextAdapter(LAKE, actions=["a", "b", "c", "A"]), "upper and lower case"),
        (lambda: TextAdapter(LAKE, actions=["a", "b", "c", "'d'"]), "cannot be the name"),
        (lambda: TextAdapter(LAKE, actions={"Jump": 7}), "'Jump' is not in Discrete"),
        (lambda: TextAdapter(LAKE, actions="Left"), "actions must be a list of texts"),
        (lambda: TextAdapter("Pendulum-v1", actions=["a"]), "fits Discrete only"),
        (lambda: TextAdapter(Echo(spaces.Text(3))), "takes text already"),
        (lambda: TextAdapter(Echo(spaces.Box(0, 1, (2, 2)))), "name those that the policy may take"),
        (lambda: TextAdapter(Echo(spaces.Box(0, 1, (99,)))), "too long to say"),
        (lambda: TextAdapter(Echo(spaces.Discrete(2), spaces.Box(0, 255, (64, 64, 3), np.uint8))), "no text"),
        (
            lambda: TextAdapter(Echo(spaces.Discrete(2), spaces.Graph(spaces.Discrete(2), None))),
            "no text form",
        ),
        (lambda: TextAdapter(POLE, observation_names=["x"]), "has 4 parts, but there are 1"),
        (
            lambda: TextAdapter(Echo(spaces.Discrete(2), spaces.Text(3)), observation_names=["x"]),
            "are for vectors",
        ),
        (lambda: TextAdapter(POLE, show="render"), "ansi rendering"),
        (lambda: TextAdapter(POLE, show="all"), "show must be"),
        (lambda: TextAdapter(POLE, render_mode="human"), "render_mode must be"),
        (lambda: TextAdapter(POLE, profile="mine"), "profile must be"),
        (lambda: TextAdapter(POLE, success="yes"), "success must be"),
        (lambda: TextAdapter(POLE, precision=0), "precision must be"),
        (lambda: TextAdapter(POLE, max_episode_steps=0), "max_episode_steps must be"),
        (lambda: TextAdapter(POLE, max_actions_per_turn=0), "max_actions_per_turn must be"),
        (lambda: TextAdapter(gymnasium.make(POLE), gravity=1), "given by its id"),
    ],
)
def test_mistakes_name_the_remedy(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# -- served ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served():
    with Server("--config", str(ROOT / "examples" / "serving" / "gymnasium_text.yaml")) as server:
        yield server


@pytest.mark.parametrize(
    ("name", "env_id", "kwargs"), [(POLE, POLE, {}), ("Lake", LAKE, {"is_slippery": False})]
)
def test_a_served_episode_is_that_of_the_bare_environment(served, name, env_id, kwargs):
    bare = gymnasium.make(env_id, **kwargs)
    remote = RemoteEnv(served.url, name)
    generator = np.random.default_rng(3)
    for seed in range(3):
        expected, _ = bare.reset(seed=seed)
        shown, info = remote.reset(seed=seed)
        words = info["available_actions"]
        over = False
        while not over:
            assert np.array_equal(info["state"]["observation"], expected)
            assert isinstance(shown, str)
            if generator.random() < 0.2:
                shown, reward, terminated, truncated, info = remote.step("I do not know.")
                assert (reward, terminated, info["action_is_valid"]) == (0.0, False, False)
                over = truncated
                continue
            number = int(generator.integers(bare.action_space.n))
            expected, *outcome, _ = bare.step(number)
            shown, *told, info = remote.step(f"<answer>{words[number]}</answer>")
            assert told == outcome
            over = outcome[1] or outcome[2]
    remote.close()


def test_a_served_policy_solves_the_lake_and_clients_choose_how_it_looks(served):
    remote = RemoteEnv(served.url, "Lake", {"show": "render", "profile": "gem"})
    shown, info = remote.reset(seed=0)
    assert shown.startswith("[S]FFF")
    assert "boxed" in info["instruction"]
    for word in ("Down", "Down", "Right", "Right", "Down", "Right"):
        _, reward, terminated, _, info = remote.step(rf"\boxed{{{word}}}")
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    remote.close()


def test_named_continuous_actions_are_served(served):
    bare, remote = gymnasium.make("MountainCarContinuous-v0"), RemoteEnv(served.url, "Brakes")
    bare.reset(seed=1)
    shown, info = remote.reset(seed=1)
    assert shown.startswith("place: ")
    assert info["available_actions"] == ["Full back", "Coast", "Full ahead"]
    _, reward, _, _, info = remote.step("Full ahead")
    expected, cost, *_ = bare.step(np.array([1.0], np.float32))
    assert (reward, info["state"]["observation"].tolist()) == (cost, expected.tolist())
    remote.close()


async def test_what_a_server_says_of_them_and_refuses(served):
    async with served.http() as client:
        info = (await client.get("/v1/envs/Lake")).json()
        assert info["action_space"] == info["observation_space"] == {"type": "UnicodeText"}
        assert (info["isolation"], info["deterministic"], info["forkable"]) == ("process", True, True)
        assert (info["max_episode_steps"], info["version"]) == (100, "1")
        assert "goal" in info["description"]
        for kwargs in ({"env": POLE}, {"is_slippery": True}, {"actions": ["a"]}):
            refused = await client.post("/v1/sessions", json={"env_id": "Lake", "kwargs": kwargs})
            assert refused.json()["code"] == "invalid_kwargs"


def test_a_name_that_is_taken_or_unknown():
    with pytest.raises(ConfigurationError, match="two environments"):
        Catalog.load(ServerSettings(gymnasium=(POLE,), gymnasium_text=(POLE,)))
    with pytest.raises(ConfigurationError, match="cannot serve"):
        Catalog.load(ServerSettings(gymnasium_text=("NoSuch-v0",)))
    loaded = Catalog.load(ServerSettings(gymnasium=(POLE,), gymnasium_text=(f"text={POLE}",)))
    assert loaded.get("text").max_episode_steps == 500
