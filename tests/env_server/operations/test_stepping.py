"""What was answered stays as it was, whatever an environment writes into the objects that it gave."""

from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from rollgym.clients.client.vector import RemoteVectorEnv
from tests.support.wire import Server

ISOLATIONS = ["inline", "thread", "process"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One environment for each isolation, called like it."""
    served = (("--env", f"{each}=tests.support.client_envs:Reused") for each in ISOLATIONS)
    isolated = (("--isolation", f"{each}={each}") for each in ISOLATIONS)
    with Server("--no-builtin", *chain.from_iterable((*served, *isolated))) as running:
        yield running


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_the_end_of_an_episode_is_not_the_begin_of_the_next(server, isolation, encoding):
    envs = RemoteVectorEnv(
        server.url, isolation, 2, autoreset_mode=AutoresetMode.SAME_STEP, encoding=encoding
    )
    begun, _ = envs.reset(seed=3)
    first = begun["grid"].copy()
    envs.step(np.array([60, 70]))
    observation, _, ended, _, info = envs.step(np.array([80, 90]))
    envs.close()
    assert ended.all()
    assert (begun["grid"] == first).all(), "what a client was given is its own"
    assert (observation["grid"] < 50).all(), "the next episodes have begun"
    for index, value in enumerate((80, 90)):
        final = info["final_obs"][index]
        assert (final["grid"] == value).all()
        assert final["pair"][0] == [value]
    assert info["final_info"]["last"]["value"].tolist() == [80, 90]
    assert [seen[1:] for seen in info["final_info"]["seen"]] == [[60, 80], [70, 90]]


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_reset_that_is_asked_for_again_is_answered_as_it_was(server, isolation):
    async with server.socket() as socket:
        made = await socket.make(isolation)
        first = await socket.call("reset", session_id=made, request_id="r1")
        await socket.call("step", session_id=made, action=77, step=0)
        assert await socket.call("reset", session_id=made, request_id="r1") == first
