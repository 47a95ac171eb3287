"""Grid games that are seen as pictures: uint8 arrays of one shape that say all that the text says."""

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from rollgym.envs.games.frozen_lake import FrozenLakeEnv
from rollgym.envs.games.sokoban.environment import SokobanEnv


@pytest.mark.parametrize(
    ("make", "shape"),
    [(FrozenLakeEnv, (32, 32, 3)), (SokobanEnv, (48, 48, 3))],
    ids=["FrozenLake", "Sokoban"],
)
def test_pictures_are_gymnasiums_boxes_and_follow_the_text(make, shape):
    env, text = make(observation="image", render_mode="rgb_array"), make()
    check_env(env, skip_render_check=True)
    assert env.observation_space == spaces.Box(0, 255, shape, np.uint8)
    pictures: dict[str, bytes] = {}
    for seed in range(12):
        seen, _ = env.reset(seed=seed)
        board, _ = text.reset(seed=seed)
        for action in ("Down", "Right", "Up", "Left", "Right", "Down"):
            assert pictures.setdefault(board, seen.tobytes()) == seen.tobytes()
            seen, *rest, info = env.step(action)
            board, *expected, told = text.step(action)
            assert rest == expected
            assert info == told
            if rest[1]:
                break
    # Boards that differ look different: the picture is enough to play by.
    assert len(set(pictures.values())) == len(pictures) > 20


def test_a_player_on_a_target_and_a_floor_look_different():
    def seen(level):
        return SokobanEnv(level=level, observation="image").reset(seed=0)[0]

    on_floor, on_target = seen("######\n#@$. #\n######"), seen("######\n#+$* #\n######")
    assert (on_floor != on_target).any()
    assert (on_floor[8:16, 8:16] != on_target[8:16, 8:16]).any()


def test_what_a_profile_says_is_the_caption():
    env = FrozenLakeEnv(observation="image", profile="roll")
    seen, info = env.reset(seed=0)
    assert info["caption"] == "Actions left: 100. Choose one of: Left, Down, Right, Up."
    assert "red square" in info["instruction"]
    after, *_, info = env.step("<answer>nothing</answer>")
    assert info["caption"].startswith("Invalid action.\nActions left: 99.")
    assert (after == seen).all()
    plain = FrozenLakeEnv(observation="image")
    assert "caption" not in plain.reset(seed=0)[1]
    assert plain.step("nothing")[-1]["caption"] == "Invalid action."


@pytest.mark.parametrize(
    ("env", "options"),
    [
        (FrozenLakeEnv(observation="image"), {"map": ["SFF", "FFF", "FFG"]}),
        (SokobanEnv(observation="image"), {"level": "#####\n#@$.#\n#####"}),
    ],
    ids=["FrozenLake", "Sokoban"],
)
def test_a_board_of_another_size_is_refused(env, options):
    env.reset(seed=0)
    with pytest.raises(ValueError, match="with observation 'image' those of this environment have"):
        env.reset(seed=0, options=options)
    assert env.reset(seed=0)[0].shape == env.observation_space.shape


def test_a_map_of_ones_own_gives_the_size():
    env = FrozenLakeEnv(map=["SFFF", "FFFG"], observation="image")
    assert env.reset(seed=0)[0].shape == (16, 32, 3)
