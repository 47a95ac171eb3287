"""RemoteEnv is a Gymnasium environment like any other."""

import gc
import json
import os
import subprocess
import sys
import threading
import urllib.request
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env, data_equivalence
from gymnasium.wrappers import TimeAwareObservation

import rollgym
from rollgym.clients.client import env as remote_env
from rollgym.clients.client.env import RemoteEnv
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import MAX_SEED
from tests.support.client_envs import Arm, Drift, Walk
from tests.support.client_server import ServerProcess


@pytest.fixture
def quiet() -> Iterator[None]:
    """Let check_env's warnings (no spec, infinite bounds) be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize("env_id", ["Walk-v0", "Arm-v0", "CartPole-v1"])
def test_it_passes_gymnasiums_checker(server: ServerProcess, env_id: str, encoding: Any) -> None:
    env = RemoteEnv(server.url, env_id, encoding=encoding)
    check_env(env)
    env.close()
    env.close()


@pytest.mark.usefixtures("quiet")
def test_gymnasium_makes_it(server: ServerProcess) -> None:
    assert rollgym.RemoteEnv is RemoteEnv
    env = gymnasium.make("rollgym/Remote-v0", url=server.url, env_id="Walk-v0", env_kwargs={"risk": 0.0})
    assert isinstance(env.unwrapped, RemoteEnv)
    local = Walk(risk=0.0)
    assert env.reset(seed=3) == local.reset(seed=3)
    assert env.step("left") == local.step("left")
    # Its render modes are the served environment's.
    check_env(env.unwrapped)
    env.close()


def test_it_renders_what_the_environment_renders(server: ServerProcess) -> None:
    with RemoteEnv(server.url, "Walk-v0", render_mode="ansi") as walk:
        local = Walk()
        local.reset(seed=1)
        walk.reset(seed=1)
        assert walk.render() == local.render()
    for encoding in ("json", "msgpack"):
        with RemoteEnv(server.url, "Arm-v0", render_mode="rgb_array", encoding=encoding) as arm:
            arm.reset(seed=1)
            assert data_equivalence(arm.render(), Arm().render())
    with pytest.raises(ValueError, match="rgb_array"):
        RemoteEnv(server.url, "Walk-v0", render_mode="rgb_array")
    with RemoteEnv(server.url, "Walk-v0") as walk:
        walk.reset(seed=1)
        assert walk.render() is None


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_arrays_come_as_they_were_sent(server: ServerProcess, encoding: Any) -> None:
    with RemoteEnv(server.url, "Arm-v0", encoding=encoding) as env:
        local = Arm()
        env.action_space.seed(0)
        assert data_equivalence(env.reset(seed=5), local.reset(seed=5), exact=True)
        for _ in range(5):
            action = env.action_space.sample()
            remote_step, local_step = env.step(action), local.step(action)
            assert data_equivalence(remote_step, local_step, exact=True)
            if local_step[2] or local_step[3]:
                break


def test_a_run_that_was_seeded_once_is_reproducible(server: ServerProcess) -> None:
    def run() -> list[Any]:
        with RemoteEnv(server.url, "Walk-v0", {"risk": 0.0}) as env:
            results: list[Any] = [env.reset(seed=8)]
            for _ in range(3):
                results += [env.step("left"), env.reset()]
            assert env.session.seed is not None
            assert 0 <= env.session.seed < MAX_SEED
            return results

    first = run()
    assert first == run()
    assert first[2] != first[4]


def test_what_the_server_refuses_is_an_exception_and_leaves_no_thread(server: ServerProcess) -> None:
    before = threading.active_count()
    with pytest.raises(ProblemError, match="unknown_env"):
        RemoteEnv(server.url, "Nope-v0")
    with pytest.raises(ProblemError, match="invalid_kwargs"):
        RemoteEnv(server.url, "Walk-v0", {"riks": 1})
    assert threading.active_count() == before


def test_a_closed_environment_says_so(server: ServerProcess) -> None:
    env = RemoteEnv(server.url, "Walk-v0")
    env.close()
    for call in (env.reset, lambda: env.step("left")):
        with pytest.raises(RuntimeError, match="this environment is closed"):
            call()


def test_an_action_outside_the_space_leaves_the_episode_unharmed(server: ServerProcess) -> None:
    with RemoteEnv(server.url, "Arm-v0") as env:
        env.reset(seed=0)
        with pytest.raises(ProblemError, match="invalid_action"):
            env.step(np.array([5.0, 0.0], np.float32))
        assert env.session.step_index == 0
        env.step(np.zeros(2, np.float32))


def test_environments_in_many_threads_do_not_disturb_each_other(server: ServerProcess) -> None:
    def play(seed: int, results: dict[int, Any]) -> None:
        with RemoteEnv(server.url, "Walk-v0", {"risk": 0.0}) as env:
            env.reset(seed=seed)
            results[seed] = [env.step("left") for _ in range(20)]

    results: dict[int, Any] = {}
    threads = [threading.Thread(target=play, args=(seed, results)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(6):
        local = Walk(risk=0.0)
        local.reset(seed=seed)
        assert results[seed] == [local.step("left") for _ in range(20)]


@pytest.mark.parametrize("isolation", ["inline", "thread", "process"])
def test_integers_of_actions_have_the_type_that_they_have_in_process(
    server: ServerProcess, isolation: str
) -> None:
    local = Drift()
    with RemoteEnv(server.url, f"Drift-{isolation}") as env:
        env.action_space.seed(1)
        assert data_equivalence(env.reset(seed=5), local.reset(seed=5), exact=True)
        rewards = []
        for _ in range(20):
            action = env.action_space.sample()
            expected = local.step(action)
            assert data_equivalence(env.step(action), expected, exact=True)
            rewards.append(expected[1])
    assert any(float(np.float32(reward)) != reward for reward in rewards)


def test_its_spec_names_it_and_its_step_limit(server: ServerProcess) -> None:
    with RemoteEnv(server.url, "CartPole-v1", token="a-secret") as env:
        spec = env.spec
        assert spec is not None
        assert (spec.id, spec.max_episode_steps) == ("CartPole-v1", 500)
        assert "a-secret" not in repr(spec)
        assert repr(env) == f"RemoteEnv('CartPole-v1' at {server.url})"
        again = spec.make()
        assert again.reset(seed=3)[0].tolist() == env.reset(seed=3)[0].tolist()
        again.close()
        assert TimeAwareObservation(env).max_timesteps == 500
    assert repr(env).endswith(", closed)")
    with RemoteEnv(server.url, "FrozenLake-v0", {"max_episode_steps": 7}) as env:
        assert env.spec is not None
        assert env.spec.max_episode_steps == 7


def test_what_gymnasium_makes_knows_the_step_limit(server: ServerProcess) -> None:
    env = gymnasium.make("rollgym/Remote-v0", url=server.url, env_id="CartPole-v1")
    assert env.spec is not None
    assert (env.spec.id, env.spec.max_episode_steps) == ("rollgym/Remote-v0", 500)
    assert TimeAwareObservation(env).max_timesteps == 500
    env.close()
    envs = gymnasium.make_vec(
        "rollgym/Remote-v0",
        num_envs=2,
        vectorization_mode="sync",
        wrappers=(TimeAwareObservation,),
        url=server.url,
        env_id="CartPole-v1",
    )
    assert envs.reset(seed=1)[0].shape == (2, 5)
    envs.close()


def test_human_rendering_shows_each_frame_in_a_window(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    pygame = pytest.importorskip("pygame")
    made = [
        RemoteEnv(server.url, "Drift-inline", render_mode="human"),
        gymnasium.make("rollgym/Remote-v0", url=server.url, env_id="Drift-inline", render_mode="human"),
    ]
    for env in made:
        assert env.metadata["render_modes"] == ["human", "rgb_array"]
        env.reset(seed=0)
        shown = pygame.display.get_surface()
        assert shown.get_size() == (6, 4)
        assert shown.get_at((0, 0))[:3] == (7, 7, 7)
        shown.fill((0, 0, 0))
        env.step(env.action_space.sample())
        assert shown.get_at((0, 0))[:3] == (7, 7, 7)
        assert env.render() is None
        env.close()
        assert not pygame.display.get_init()


def test_human_rendering_that_cannot_be_is_refused_at_once(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"Walk-v0 renders as one of \['ansi'\], not as 'human'"):
        RemoteEnv(server.url, "Walk-v0", render_mode="human")
    monkeypatch.setattr(remote_env, "find_spec", lambda name: None)
    with pytest.raises(gymnasium.error.DependencyNotInstalled, match=r"needs pygame.*: pip install pygame$"):
        RemoteEnv(server.url, "Drift-inline", render_mode="human")


def sessions_of(server: ServerProcess) -> int:
    with urllib.request.urlopen(f"{server.url}/v1/info") as answer:
        return int(json.load(answer)["capacity"]["sessions"])


def wait_for_threads(before: set[threading.Thread]) -> None:
    for thread in set(threading.enumerate()) - before:
        thread.join(30)


def test_one_that_is_dropped_is_closed_with_a_warning(server: ServerProcess) -> None:
    threads, before = set(threading.enumerate()), sessions_of(server)
    env = RemoteEnv(server.url, "Walk-v0")
    env.reset(seed=1)
    assert sessions_of(server) == before + 1
    with pytest.warns(ResourceWarning, match=r"unclosed RemoteEnv\('Walk-v0' at "):
        del env
    wait_for_threads(threads)
    assert set(threading.enumerate()) == threads
    assert sessions_of(server) == before


def test_one_that_is_closed_is_dropped_without_a_warning(server: ServerProcess) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        env = RemoteEnv(server.url, "Walk-v0")
        env.close()
        del env
        gc.collect()


def test_one_that_a_program_leaves_open_is_closed_when_it_ends(server: ServerProcess) -> None:
    before = sessions_of(server)
    program = f"import rollgym; env = rollgym.RemoteEnv({server.url!r}, 'Walk-v0'); env.reset(seed=1)"
    ended = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "ResourceWarning: unclosed RemoteEnv('Walk-v0' at" in ended.stderr
    assert sessions_of(server) == before


def test_a_fork_that_drops_one_leaves_it_to_its_parent(server: ServerProcess) -> None:
    with RemoteEnv(server.url, "Walk-v0", {"risk": 0.0}) as env:
        env.reset(seed=1)
        child = os.fork()
        if child == 0:
            env._dropped()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        observation, *_ = env.step("left")
        local = Walk(risk=0.0)
        local.reset(seed=1)
        assert observation == local.step("left")[0]
