"""A run that learns nothing says so, and ends; one that has learnt, or has nothing left to learn, goes on."""

from dataclasses import replace

import pytest

from rollgym.trainer.config.rollout import RolloutSettings
from rollgym.trainer.learn.health import Learning, RunHealth, episode_health, sign_of
from rollgym.trainer.rollout.scheduler import NothingToLearnError
from tests.support.played_groups import sharp_groups

WELL = {
    "rollout/success": 0.4,
    "rollout/reward": 0.4,
    "rollout/groups_kept": 4.0,
    "policy/optimizer_steps": 2.0,
    "policy/skipped_steps": 0.0,
    "policy/entropy": 0.8,
    "policy/gradient_norm": 0.3,
    "batch/rows": 16.0,
    "batch/advantage_max": 1.2,
    "health/distinct_rewards": 5.0,
    "health/equal_groups": 0.25,
    "health/alike_groups": 0.0,
}
NO_STEP = {"policy/optimizer_steps": 0.0}
PAID_ALIKE = {"health/distinct_rewards": 1.0, "rollout/success": 0.0, "rollout/reward": 0.0}
NO_ADVANTAGE = {"batch/advantage_max": 0.0}
COLLAPSED = {"policy/entropy": 0.001, "health/alike_groups": 1.0}


def reason(changes, **learning):
    found = sign_of(WELL | changes, Learning(**learning))
    return None if found is None else found.reason


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"health/equal_groups": 1.0}, None),  # groups differ from each other
        ({"policy/entropy": 0.001}, None),
        ({"health/alike_groups": 1.0}, None),
        (NO_STEP | {"rollout/groups_kept": 0.0}, "filter kept none"),
        (NO_STEP | {"batch/rows": 0.0}, "no episode with sampled tokens"),
        (NO_STEP | {"policy/skipped_steps": 2.0}, "every optimizer step was left out"),
        (
            NO_STEP | {"policy/skipped_steps": 2.0, "rollout/success": 1.0},
            "every optimizer step was left out",
        ),
        (NO_ADVANTAGE, "every advantage is 0"),
        ({"batch/advantage_max": 1e-12}, "every advantage is 0"),
        ({"policy/gradient_norm": 0.0}, "the gradient of the loss is 0"),
        (NO_ADVANTAGE | {"policy/gradient_norm": 0.0}, "every advantage is 0"),
        (PAID_ALIKE, "all episodes were paid alike"),
        (COLLAPSED, "entropy is gone"),
        (NO_ADVANTAGE | {"rollout/success": 1.0}, "all episodes were solved"),
        (NO_STEP | {"rollout/groups_kept": 0.0, "rollout/success": 1.0}, "all episodes were solved"),
        ({"rollout/success": 1.0}, None),
    ],
)
def test_why_nothing_was_learnt_in_a_step(changes, expected):
    found = reason(changes)
    assert found is None if expected is None else expected in found


def test_what_is_not_learnt_from_is_no_sign():
    for changes in (NO_ADVANTAGE, PAID_ALIKE, COLLAPSED):
        assert reason(changes, rewards=False) is None, "a teacher has something to say"
    assert reason(PAID_ALIKE, paid_alike=False) is None
    for changes in (NO_ADVANTAGE, PAID_ALIKE):
        assert reason(changes, advantages=False) is None, "its gradient is not zero"
    assert "every advantage" in reason(NO_ADVANTAGE | {"policy/gradient_norm": 0.0}, advantages=False)
    assert "filter" in reason(NO_STEP | {"rollout/groups_kept": 0.0}, rewards=False)
    assert "gradient" in reason({"policy/gradient_norm": 0.0}, rewards=False)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), True, "many"])
def test_a_metric_that_is_no_number_says_nothing(value):
    assert (
        reason(dict.fromkeys(["batch/advantage_max", "policy/entropy", "health/alike_groups"], value)) is None
    )


class Followed:
    """A run of steps with given metrics."""

    def __init__(self, limit=5, earlier=()):
        self.said = []
        self.health = RunHealth(Learning(), limit, self.said.append)
        self.health.take_up(earlier)
        self.steps = len(earlier)
        self.numbers = []

    def go(self, count, **changes):
        for _ in range(count):
            metrics = WELL | changes
            self.numbers.append(self.health.note(self.steps, metrics)["health/steps_without_learning"])
            self.steps += 1
            self.health.check()
        return self


def test_it_is_told_at_the_first_step_and_ever_more_rarely():
    run = Followed(limit=None).go(3).go(40, **NO_ADVANTAGE)
    heads = [line.split(": ")[:2] for line in run.said]
    rows = [f"steps 4 to {step}" for step in (5, 7, 11, 19, 35)]
    assert heads == [["health", f"{steps} had nothing to learn from"] for steps in ("step 4", *rows)]
    assert run.numbers == [0.0] * 3 + [float(count) for count in range(1, 41)]
    assert "rollout/valid_replies" in run.said[0]


def test_steps_without_learning_now_and_then_do_not_fill_the_console():
    run = Followed(limit=None)
    for _ in range(64):
        run.go(1).go(1, **NO_ADVANTAGE)
    assert len(run.said) == 7


def test_a_run_that_does_worse_than_at_first_and_learns_nothing_ends():
    run = Followed().go(10)
    with pytest.raises(
        NothingToLearnError, match=r"5 steps in a row .*max_steps_without_learning 5\).*entropy"
    ):
        run.go(5, **{"policy/entropy": 0.0, "health/alike_groups": 1.0, "rollout/success": 0.0})
    assert run.steps == 15


def test_one_that_never_learnt_ends_too():
    with pytest.raises(NothingToLearnError, match="paid alike"):
        Followed().go(5, **PAID_ALIKE)


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout/success": 0.9, **NO_ADVANTAGE},  # it has learnt what it can
        {"rollout/success": 0.9, **COLLAPSED},
        {"rollout/success": 1.0, **NO_STEP, "rollout/groups_kept": 0.0},  # a filter has nothing left to keep
    ],
)
def test_a_run_that_has_learnt_goes_on(changes):
    run = Followed().go(10).go(30, **changes)
    assert run.steps == 40
    assert run.said


def test_a_run_whose_rewards_have_risen_goes_on_where_nothing_is_ever_solved():
    unsolved = {"rollout/success": 0.0}
    Followed().go(10, **unsolved).go(30, **unsolved, **NO_ADVANTAGE, **{"rollout/reward": 0.5})
    with pytest.raises(NothingToLearnError):
        Followed().go(10, **unsolved).go(30, **unsolved, **NO_ADVANTAGE, **{"rollout/reward": 0.3})


# Every other step of SmolLM2's FrozenLake runs on one H200, from the first one on: entropy, success and reward.
AT_6E_5 = [
    (1.7797, 0.0, -0.1562),
    (0.0239, 0.0, -0.0016),
    (0.0145, 0.0, 0.0),
    (0.0119, 0.0, 0.0),
    (0.0183, 0.0, 0.0),
    (0.0771, 0.0, 0.0),
    (0.1381, 0.0, 0.0),
]
AT_2E_5 = [
    (1.8194, 0.0, -0.1562),
    (0.7809, 0.0, -0.0531),
    (0.3948, 0.0078, -0.0047),
    (0.3445, 0.0156, 0.0133),
    (0.4076, 0.3672, 0.3656),
    (0.359, 0.3828, 0.382),
    (0.3291, 0.3203, 0.3203),
]


def follow(run, steps):
    for entropy, success, reward in steps:
        alike = {} if reward or success else PAID_ALIKE | NO_ADVANTAGE
        run.go(
            1, **{"policy/entropy": entropy, **alike, "rollout/success": success, "rollout/reward": reward}
        )


def test_a_learning_rate_that_is_too_high_is_told_at_once_and_ends_the_run():
    run = Followed(limit=5)
    with pytest.raises(NothingToLearnError, match=r"5 steps in a row .* a third of optimizer\.learning_rate"):
        follow(run, AT_6E_5)
    first, second = run.said[:2]
    assert first.startswith(
        "health: entropy fell from 1.78 to 0.0239 by step 2, and no more episodes are solved"
    )
    assert "optimizer.learning_rate may be too high" in first
    assert second.startswith("health: step 3 had nothing to learn from: entropy was lost in the first steps")
    assert sum("entropy fell" in line for line in run.said) == 1


def test_one_that_is_not_is_not_told():
    run = Followed(limit=5)
    follow(run, AT_2E_5)
    assert run.said == []


@pytest.mark.parametrize("success", [0.9, 1.0])
def test_a_policy_whose_entropy_goes_since_it_has_learnt_is_not_told(success):
    run = Followed(limit=5).go(1, **{"rollout/success": 0.3})
    run.go(30, **{"policy/entropy": 0.001, "rollout/success": success})
    later = Followed(limit=5).go(20).go(5, **{"policy/entropy": 0.001})
    solved = Followed(limit=5).go(5, **{"policy/entropy": 1.0, "rollout/success": 1.0})
    solved.go(3, **{"policy/entropy": 0.01, "rollout/success": 1.0})
    assert run.said == later.said == solved.said == []


def test_a_resumed_run_knows_that_its_entropy_fell():
    earlier = [WELL | {"policy/entropy": 2.0}, WELL | {"policy/entropy": 0.01}]
    run = Followed(limit=None, earlier=earlier).go(1, **PAID_ALIKE)
    assert len(run.said) == 1
    assert "a third of optimizer.learning_rate" in run.said[0]


def test_a_resumed_run_counts_on():
    earlier = [{"step": 0, "evaluate/held_out/success": 0.5}, *[WELL | PAID_ALIKE | {"step": 1}] * 4]
    with pytest.raises(NothingToLearnError, match="5 steps in a row"):
        Followed(earlier=earlier).go(1, **PAID_ALIKE)


def test_a_whole_run_without_an_optimizer_step_is_no_success():
    run = Followed().go(2, **NO_STEP, **{"policy/skipped_steps": 1.0})
    with pytest.raises(NothingToLearnError, match="no optimizer step was taken in all 2 steps"):
        run.health.check_whole()
    Followed().go(1).go(2, **NO_STEP, **{"policy/skipped_steps": 1.0}).health.check_whole()
    Followed().health.check_whole()  # nothing was to be trained
    Followed().go(3, **NO_STEP, **{"rollout/groups_kept": 0.0, "rollout/success": 1.0}).health.check_whole()


def test_how_far_the_episodes_of_a_step_differ():
    groups = sharp_groups(groups=2, members=3)
    first, second = groups
    for trajectory in first.trajectories:
        for turn in trajectory.turns:
            turn.reward = 0.0
    found = episode_health(groups)
    assert found["health/equal_groups"] == 0.5
    assert found["health/alike_groups"] == 0.0
    second.trajectories = [second.trajectories[0]] * 3
    assert episode_health(groups)["health/equal_groups"] == 1.0
    assert episode_health(groups)["health/alike_groups"] == 0.5
    assert episode_health([first])["health/distinct_rewards"] == 1.0
    # Equal sums that are paid at other times are told apart by discounts.
    one = next(each for each in first.trajectories if len(each.turns) > 1)
    other = replace(one, turns=[replace(turn) for turn in one.turns])
    one.turns[0].reward, other.turns[1].reward = 1.0, 1.0
    first.trajectories = [one, other]
    assert episode_health([first])["health/distinct_rewards"] == 2.0


def test_a_group_of_one_is_compared_with_nobody():
    groups = sharp_groups(groups=2, members=1)
    assert set(episode_health(groups)) == {"health/distinct_rewards"}


def test_a_run_that_solves_one_episode_in_a_thousand_is_hardly_ever_ended_by_the_default():
    rollout = RolloutSettings()
    success, size = 0.001, rollout.group_size
    equal_group = success**size + (1 - success) ** size
    assert rollout.max_steps_without_learning is not None
    ended = equal_group ** (rollout.groups_per_step * rollout.max_steps_without_learning)
    assert ended < 1e-5
    assert ended == pytest.approx(3e-6, rel=0.2), "as the setting says"
