"""Gymnasium's wrappers over an environment on a server do what they do over the same one in this process."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import wrappers
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as vector_wrappers

from rollgym.clients.client.env import RemoteEnv
from rollgym.clients.client.vector import RemoteVectorEnv
from tests.support.client_envs import Drift
from tests.support.client_server import ServerProcess

Wrap = Callable[[Any], Any]
STEPS = 30

WRAPPERS: dict[str, Wrap] = {
    "TimeAwareObservation": wrappers.TimeAwareObservation,
    "TimeLimit": lambda env: wrappers.TimeLimit(env, 7),
    "RecordEpisodeStatistics": wrappers.RecordEpisodeStatistics,
    "NormalizeObservation": wrappers.NormalizeObservation,
    "NormalizeReward": wrappers.NormalizeReward,
    "FrameStackObservation": lambda env: wrappers.FrameStackObservation(env, 3),
    "DelayObservation": lambda env: wrappers.DelayObservation(env, 2),
    "ClipReward": lambda env: wrappers.ClipReward(env, -0.5, 0.5),
    "DtypeObservation": lambda env: wrappers.DtypeObservation(env, np.float16),
    "FlattenObservation": wrappers.FlattenObservation,
    "TransformAction": lambda env: wrappers.TransformAction(env, lambda action: action, env.action_space),
    "PassiveEnvChecker": wrappers.PassiveEnvChecker,
    "OrderEnforcing": wrappers.OrderEnforcing,
}
VECTOR_WRAPPERS: dict[str, Wrap] = {
    "RecordEpisodeStatistics": vector_wrappers.RecordEpisodeStatistics,
    "NormalizeObservation": vector_wrappers.NormalizeObservation,
    "NormalizeReward": vector_wrappers.NormalizeReward,
    "ClipReward": lambda envs: vector_wrappers.ClipReward(envs, -0.5, 0.5),
    "FlattenObservation": vector_wrappers.FlattenObservation,
    "DictInfoToList": vector_wrappers.DictInfoToList,
}


def without_times(info: Any) -> Any:
    """An info without how long something took."""
    if isinstance(info, dict):
        return {key: without_times(value) for key, value in info.items() if key not in ("t", "_t")}
    return [without_times(each) for each in info] if isinstance(info, list) else info


def cart_pole() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1")


LOCAL: dict[str, Callable[[], gymnasium.Env[Any, Any]]] = {"CartPole-v1": cart_pole, "Drift-inline": Drift}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("env_id", LOCAL)
def test_wrappers(server: ServerProcess, env_id: str) -> None:
    for name, wrap in WRAPPERS.items():
        if name == "TimeAwareObservation" and env_id != "CartPole-v1":
            continue
        remote, local = wrap(RemoteEnv(server.url, env_id)), wrap(LOCAL[env_id]())
        local.action_space.seed(3)
        assert data_equivalence(remote.reset(seed=5), local.reset(seed=5), exact=True), name
        for _ in range(STEPS):
            action = local.action_space.sample()
            one, other = remote.step(action), local.step(action)
            assert data_equivalence(one[:4], other[:4], exact=True), name
            assert data_equivalence(without_times(one[4]), without_times(other[4])), name
            if other[2] or other[3]:
                break
        remote.close()
        local.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("env_id", LOCAL)
def test_vector_wrappers(server: ServerProcess, env_id: str) -> None:
    """Until the first episode ends: later ones begin by seeds, which an environment alone does not need."""
    for name, wrap in VECTOR_WRAPPERS.items():
        remote = wrap(RemoteVectorEnv(server.url, env_id, 2, autoreset_mode=AutoresetMode.NEXT_STEP))
        local = wrap(SyncVectorEnv([LOCAL[env_id]] * 2))
        local.action_space.seed(3)
        assert data_equivalence(remote.reset(seed=5)[0], local.reset(seed=5)[0], exact=True), name
        for _ in range(STEPS):
            actions = local.action_space.sample()
            one, other = remote.step(actions), local.step(actions)
            assert data_equivalence(one[:4], other[:4], exact=True), name
            if (other[2] | other[3]).any():
                break
        remote.close()
        local.close()
