"""RemoteEnv is a Gymnasium environment like any other."""

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env, data_equivalence

import rollgym
from rollgym.clients.client.env import RemoteEnv
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import MAX_SEED
from tests.support.client_envs import Arm, Walk
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
