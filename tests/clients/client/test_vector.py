"""RemoteVectorEnv behaves as Gymnasium's own vector environments do."""

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import rollgym
from rollgym.clients.client.vector import RemoteVectorEnv, SeedStream
from rollgym.clients.protocol.errors import ProblemError
from tests.support.client_envs import Arm, Walk
from tests.support.client_server import ServerProcess

COUNT = 4
MODES = list(AutoresetMode)


class SeededResets(gymnasium.Wrapper):
    """Gives each episode a seed of its own, drawn as `RemoteEnv` draws them."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self._generator = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        if seed is None:
            return self.env.reset(seed=int(self._generator.integers(2**53)), options=options)
        self._generator, _ = gymnasium.utils.seeding.np_random(seed)
        return self.env.reset(seed=seed, options=options)


def frozen_lake() -> gymnasium.Env:
    return gymnasium.make("rollgym/FrozenLake-v0", disable_env_checker=True)


KINDS: dict[str, Callable[[], gymnasium.Env]] = {"Walk-v0": Walk, "Arm-v0": Arm, "FrozenLake-v0": frozen_lake}


def choose(env_id: str, step: int) -> Any:
    """Actions for a step, equal ones for equal steps."""
    stream = np.random.default_rng(step)
    if env_id == "Arm-v0":
        return stream.uniform(-1, 1, (COUNT, 2)).astype(np.float32)
    return tuple(str(each) for each in stream.choice(["Left", "Down", "Right", "Up", "what?"], COUNT))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env_id", KINDS)
@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_it_gives_what_a_local_vector_gives(
    server: ServerProcess, env_id: str, mode: Any, encoding: Any
) -> None:
    remote = RemoteVectorEnv(server.url, env_id, COUNT, autoreset_mode=mode, encoding=encoding)
    local = SyncVectorEnv([lambda: SeededResets(KINDS[env_id]())] * COUNT, autoreset_mode=mode)
    assert remote.observation_space == local.observation_space
    assert remote.action_space == local.action_space
    assert remote.metadata["autoreset_mode"] is mode
    assert data_equivalence(remote.reset(seed=3), local.reset(seed=3), exact=True)
    ends = 0
    for step in range(25):
        actions = choose(env_id, step)
        results = [envs.step(actions) for envs in (remote, local)]
        ended = results[1][2] | results[1][3]
        ends += int(ended.sum())
        assert data_equivalence(*map(comparable, results), exact=True)
        if mode is AutoresetMode.DISABLED and ended.any():
            begun = [envs.reset(options={"reset_mask": ended.copy()}) for envs in (remote, local)]
            assert data_equivalence(*map(comparable, begun), exact=True)
    assert ends > 3
    remote.close()
    remote.close()
    assert remote.closed


def comparable(result: Any) -> Any:
    """Spell out object arrays, whose comparison Gymnasium's helper leaves to `==`."""
    if isinstance(result, np.ndarray) and result.dtype == object:
        return [comparable(part) for part in result]
    if isinstance(result, dict):
        return {key: comparable(value) for key, value in result.items()}
    if isinstance(result, (tuple, list)):
        return [comparable(part) for part in result]
    return result


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_was_seeded_once_is_reproducible(server: ServerProcess, mode: Any) -> None:
    def run() -> list[Any]:
        envs = RemoteVectorEnv(server.url, "Walk-v0", COUNT, {"risk": 0.5}, autoreset_mode=mode)
        results = [envs.reset(seed=[5, 5, 6, 7])]
        for _ in range(8):
            results.append(envs.step(["left"] * COUNT))
            ended = results[-1][2] | results[-1][3]
            if mode is AutoresetMode.DISABLED and ended.any():
                results.append(envs.reset(options={"reset_mask": ended}))
        envs.close()
        return results

    first, second = run(), run()
    assert data_equivalence(comparable(first), comparable(second), exact=True)
    assert first[0][0][0] == first[0][0][1]


def test_gymnasium_makes_it(server: ServerProcess) -> None:
    assert rollgym.RemoteVectorEnv is RemoteVectorEnv
    envs = gymnasium.make_vec("rollgym/Remote-v0", num_envs=3, url=server.url, env_id="CartPole-v1")
    assert isinstance(envs, RemoteVectorEnv)
    observations, _ = envs.reset(seed=1)
    assert observations in envs.observation_space
    expected = gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")
    assert np.array_equal(observations, expected.reset(seed=1)[0])
    actions = np.array([0, 1, 0])
    for remote_part, local_part in zip(envs.step(actions)[:4], expected.step(actions)[:4], strict=True):
        assert np.array_equal(remote_part, local_part)
    envs.close()


def test_it_renders_all(server: ServerProcess) -> None:
    envs = RemoteVectorEnv(server.url, "Walk-v0", 2, render_mode="ansi")
    envs.reset(seed=0)
    frames = envs.render()
    assert frames is not None
    assert [frame[0] for frame in frames] == ["[", "["]
    envs.close()


def test_misuse_is_told_before_anything_is_done(server: ServerProcess) -> None:
    envs = RemoteVectorEnv(server.url, "Walk-v0", 2, {"risk": 1.0}, autoreset_mode="Disabled")
    with pytest.raises(ResetNeeded):
        envs.reset(options={"reset_mask": np.array([True, False])})
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="actions"):
        envs.step(["left"])
    envs.step(["left", "left"])
    with pytest.raises(ResetNeeded):
        envs.step(["left", "left"])
    for mask, error in (
        (np.array([True]), TypeError),
        ([True, True], TypeError),
        (np.zeros(2, bool), ValueError),
    ):
        with pytest.raises(error):
            envs.reset(options={"reset_mask": mask})
    with pytest.raises(ValueError, match="seeds"):
        envs.reset(seed=[1])
    envs.close()
    with pytest.raises(ValueError, match="num_envs"):
        RemoteVectorEnv(server.url, "Walk-v0", 0)


def test_a_failing_sub_environment_is_named(server: ServerProcess) -> None:
    envs = RemoteVectorEnv(server.url, "Walk-v0", 3)
    envs.reset(seed=0)
    with pytest.raises(ProblemError, match="env_error") as failed:
        envs.step(["left", "raise", "left"])
    assert failed.value.__notes__ == ["in sub-environment 1"]
    envs.close()


@pytest.fixture
def pair(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[RemoteVectorEnv]:
    """Two walks of which each step is the last; the second one fails when it is told to."""
    envs = RemoteVectorEnv(server.url, "Walk-v0", 2, {"risk": 1.0}, autoreset_mode=request.param)
    yield envs
    envs.close()


def walk_of(seed: int) -> str:
    """How a walk of a seed begins."""
    observation: str = Walk().reset(seed=seed)[0]
    return observation


@pytest.mark.parametrize("pair", [AutoresetMode.SAME_STEP], indirect=True)
def test_a_failure_beside_it_makes_no_sub_environment_play_a_seed_twice(pair: RemoteVectorEnv) -> None:
    seeds = SeedStream(0)
    pair.reset(seed=0)
    with pytest.raises(ProblemError, match="env_error"):
        pair.step(["left", "raise"])
    second = walk_of(seeds.take())
    observations, _ = pair.reset(options={"reset_mask": np.array([False, True])})
    assert observations[0] == second
    observations, *_ = pair.step(["left", "left"])
    assert observations[0] == walk_of(seeds.take()) != second


@pytest.mark.parametrize("pair", [AutoresetMode.NEXT_STEP], indirect=True)
def test_a_failure_beside_it_hides_no_end_of_an_episode(pair: RemoteVectorEnv) -> None:
    pair.reset(seed=0)
    with pytest.raises(ProblemError, match="env_error"):
        pair.step(["left", "raise"])
    pair.reset(options={"reset_mask": np.array([False, True])})
    observations, rewards, terminations, *_ = pair.step(["left", "left"])
    assert observations[0] == walk_of(SeedStream(0).take())
    assert (rewards[0], terminations.tolist()) == (0.0, [False, True])


@pytest.mark.parametrize("pair", [AutoresetMode.DISABLED], indirect=True)
def test_a_seed_that_the_wire_does_not_carry_resets_nothing(pair: RemoteVectorEnv) -> None:
    pair.reset(seed=0)
    with pytest.raises(ValueError, match="seed"):
        pair.reset(seed=[7, 2**60])
    observations, _, _, _, _ = pair.step(["left", "left"])
    assert len(observations) == 2
    observations, _ = pair.reset(seed=[7, 8])
    assert observations[0] == walk_of(7)


def test_attributes_are_those_that_the_wire_knows(server: ServerProcess) -> None:
    remote = RemoteVectorEnv(server.url, "CartPole-v1", 2)
    local = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    for name in ("action_space", "observation_space", "render_mode"):
        assert remote.get_attr(name) == local.get_attr(name)
    assert [spec.max_episode_steps for spec in remote.get_attr("spec")] == [500, 500]
    assert remote.spec is not None
    assert remote.spec.id == "CartPole-v1"
    assert remote.call("render") == (None, None)
    for refused in (lambda: remote.get_attr("gravity"), lambda: remote.call("close")):
        with pytest.raises(AttributeError, match="environments on a server have no"):
            refused()
    with pytest.raises(AttributeError, match="env_kwargs"):
        remote.set_attr("gravity", 3)
    remote.close()
    walks = RemoteVectorEnv(server.url, "Walk-v0", 2, render_mode="ansi")
    walks.reset(seed=0)
    assert walks.call("render") == walks.render()
    walks.close()


def test_human_rendering_shows_all_in_one_window(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    pygame = pytest.importorskip("pygame")
    envs = RemoteVectorEnv(server.url, "Drift-inline", 3, render_mode="human")
    envs.reset(seed=0)
    shown = pygame.display.get_surface()
    assert shown.get_size() == (12, 8)
    assert [shown.get_at(place)[0] for place in ((0, 0), (11, 3), (5, 7), (6, 4))] == [7, 7, 7, 0]
    assert envs.render() is None
    envs.close()
    assert not pygame.display.get_init()
