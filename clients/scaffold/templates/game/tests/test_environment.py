"""The environment passes the checks of Gymnasium and rollgym, and can be won."""

from gymnasium.utils.env_checker import check_env
from rollgym import check_environment

from scaffold_name import ScaffoldName


def test_it_passes_the_check_of_gymnasium() -> None:
    check_env(ScaffoldName(), skip_render_check=True)


def test_it_passes_the_check_of_rollgym() -> None:
    check_environment("scaffold_name.environment:ScaffoldName")


def test_the_expert_finds_every_number() -> None:
    env = ScaffoldName()
    for seed in range(20):
        _, info = env.reset(seed=seed, options={"expert": True})
        reward, ended = 0.0, False
        while not ended:
            _, reward, terminated, truncated, info = env.step(info["expert_action"])
            ended = terminated or truncated
        assert reward == 1.0
        assert info["success"]


def test_a_reply_that_is_no_guess_costs_a_step_and_changes_nothing() -> None:
    env = ScaffoldName(max_episode_steps=2)
    before, _ = env.reset(seed=1)
    after, reward, terminated, truncated, info = env.step("perhaps 3?")
    assert (after, reward, terminated, truncated) == (before, 0.0, False, False)
    assert not info["action_is_valid"]
    *_, truncated, info = env.step("")
    assert truncated
