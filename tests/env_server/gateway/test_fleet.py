"""A gateway with nodes of ours behind it: what survives, what is shared out, and what is the same as without it."""

import asyncio
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from mcp import Client

from rollgym.clients.client.client import EnvClient
from rollgym.clients.client.env import RemoteEnv
from rollgym.clients.protocol.errors import ProblemError
from tests.support.client_server import ENVS, ServerProcess

QUIET = ("--log-level", "error")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    state = str(tmp_path_factory.mktemp("state"))
    with ServerProcess(("--gateway", "--allow-network", "loopback", "--state-dir", state, *QUIET)) as running:
        yield running


@pytest.fixture(scope="module")
def nodes(gateway: ServerProcess) -> Iterator[list[ServerProcess]]:
    ours = (
        "FrozenLake-v0=rollgym.envs.games.frozen_lake:FrozenLakeEnv",
        "ToolUse-v0=rollgym.envs.tools.tool_use:ToolUseEnv",
    )
    few = ("--no-builtin", *(part for each in ours for part in ("--env", each)))
    arguments = (*few, *ENVS, "--register", gateway.url, *QUIET)
    with ServerProcess(arguments) as one, ServerProcess((*arguments, "--processes", "2")) as other:
        asyncio.run(replicas(gateway, 2))
        yield [one, other]


async def replicas(gateway: ServerProcess, count: int) -> None:
    """Wait until all environments have so many replicas."""
    async with httpx.AsyncClient(base_url=gateway.url) as http, asyncio.timeout(60):
        while True:
            found = (await http.get("/v1/envs")).json().get("envs", [])
            if len(found) == 10 and all(env["replicas"] == count for env in found):
                return
            await asyncio.sleep(0.1)


async def test_the_catalog_is_that_of_the_nodes(gateway: ServerProcess, nodes: list[ServerProcess]) -> None:
    async with EnvClient(gateway.url) as there, EnvClient(nodes[0].url) as here:
        offered = {env.env_id: env for env in await there.envs()}
        own = {env.env_id: env for env in await here.envs()}
        assert offered.keys() == own.keys()
        for env_id, env in offered.items():
            assert env.origin == "registered"
            same = ("version", "kind", "action_space", "observation_space", "kwargs_schema", "deterministic")
            assert [getattr(env, name) for name in same] == [getattr(own[env_id], name) for name in same]
        assert (await there.info()).role == "gateway"


async def test_tools_of_a_nodes_environment_are_called_over_mcp(
    gateway: ServerProcess, nodes: list[ServerProcess]
) -> None:
    async with Client(f"{gateway.url}/mcp/ToolUse-v0?seed=3") as agent:
        assert "calculator" in {tool.name for tool in (await agent.list_tools()).tools}
        for number in range(3):
            result = await agent.call_tool("calculator", {"expression": f"6 * {number}"})
            assert result.content[0].text == str(6 * number)
            assert result.meta is not None
            assert result.meta["rollgym/answer"]["step"] == number + 1


async def test_tools_are_called_where_a_session_has_gone_on(
    gateway: ServerProcess, nodes: list[ServerProcess]
) -> None:
    before = await count(nodes[0])
    async with Client(f"{gateway.url}/mcp/ToolUse-v0?seed=3") as agent:
        tools = (await agent.list_tools()).tools
        await agent.call_tool("store_set", {"key": "lamps", "value": "7"})
        home = nodes[0] if await count(nodes[0]) > before else nodes[1]
        home.kill()
        assert (await agent.list_tools()).tools == tools
        result = await agent.call_tool("store_get", {"key": "lamps"})
        # Which tools there are is asked for at each call, and no episode begins for that.
        assert result.content[0].text == "7"
        assert result.meta is not None
        assert (result.meta["rollgym/answer"]["episode"], result.meta["rollgym/answer"]["step"]) == (0, 2)
        home.start()
    await replicas(gateway, 2)


@pytest.mark.parametrize("env_id", ["Walk-v0", "Arm-v0", "FrozenLake-v0"])
async def test_episodes_are_those_of_a_node(
    gateway: ServerProcess, nodes: list[ServerProcess], env_id: str
) -> None:
    def play(url: str) -> list[object]:
        with RemoteEnv(url, env_id) as env:
            env.action_space.seed(1)
            seen: list[object] = [env.reset(seed=5)]
            for _ in range(12):
                seen.append(env.step(env.action_space.sample()))
                if seen[-1][2] or seen[-1][3]:  # type: ignore[index]
                    seen.append(env.reset())
            return seen

    through, direct = await asyncio.gather(
        asyncio.to_thread(play, gateway.url), asyncio.to_thread(play, nodes[0].url)
    )
    np.testing.assert_equal(through, direct)


async def test_sessions_are_shared_out(gateway: ServerProcess, nodes: list[ServerProcess]) -> None:
    async with EnvClient(gateway.url) as client:
        before = [await count(node) for node in nodes]
        sessions = await client.make_many("Walk-v0", 20)
        after = [await count(node) for node in nodes]
        assert [late - early for late, early in zip(after, before, strict=True)] == [10, 10]
        await client.close_sessions(sessions)


async def count(node: ServerProcess) -> int:
    async with httpx.AsyncClient(base_url=node.url) as http:
        return int((await http.get("/v1/info")).json()["capacity"]["sessions"])


async def test_what_the_environment_refuses_comes_through(
    gateway: ServerProcess, nodes: list[ServerProcess]
) -> None:
    async with EnvClient(gateway.url) as client:
        with pytest.raises(ProblemError, match="invalid_kwargs"):
            await client.make("Walk-v0", {"risk": "high"})
        session = await client.make("Arm-v0")
        await session.reset(seed=1)
        with pytest.raises(ProblemError, match="invalid_action"):
            await session.step(np.array([5.0, 0.0], np.float32))
        assert session.step_index == 0


async def test_a_node_that_is_killed_costs_a_slower_step(
    gateway: ServerProcess, nodes: list[ServerProcess]
) -> None:
    async with EnvClient(gateway.url) as client, EnvClient(nodes[1].url) as direct:
        sessions = [await client.make("Walk-v0", {"risk": 0.0}) for _ in range(8)]
        twins = [await direct.make("Walk-v0", {"risk": 0.0}) for _ in range(8)]
        for seed, pair in enumerate(zip(sessions, twins, strict=True)):
            assert await pair[0].reset(seed=seed) == await pair[1].reset(seed=seed)
        for number in range(12):
            if number == 4:
                nodes[0].kill()
            if number == 8:
                nodes[0].start()
            steps = await asyncio.gather(*(each.step(str(number)) for each in (*sessions, *twins)))
            assert steps[:8] == steps[8:]
    await replicas(gateway, 2)


async def test_nodes_register_again_with_a_gateway_that_was_started_anew(
    gateway: ServerProcess, nodes: list[ServerProcess]
) -> None:
    async with EnvClient(gateway.url) as client, EnvClient(nodes[0].url) as direct:
        session, twin = (
            await client.make("Walk-v0", {"risk": 0.0}),
            await direct.make("Walk-v0", {"risk": 0.0}),
        )
        assert await session.reset(seed=1) == await twin.reset(seed=1)
        assert await session.step("a") == await twin.step("a")
        session_id = session.session_id
        gateway.kill()
        gateway.start()
        assert await session.step("b") == await twin.step("b")
        assert session.session_id == session_id, (
            "it is the same session, and not one that the client restored"
        )
    await replicas(gateway, 2)


async def test_a_node_that_stops_says_so(gateway: ServerProcess, nodes: list[ServerProcess]) -> None:
    nodes[1].stop()
    await replicas(gateway, 1)
    nodes[1].start()
    await replicas(gateway, 2)


async def test_a_verifier_whose_server_takes_less_at_a_time_is_asked_for_less() -> None:
    equal = ("--no-builtin", "--env", "Equal=tests.support.served_envs:Equal", *QUIET)
    with (
        ServerProcess(("--gateway", "--allow-network", "loopback", *QUIET)) as other,
        ServerProcess((*equal, "--max-request-bytes", "4000", "--register", other.url)),
    ):
        async with EnvClient(other.url) as client, asyncio.timeout(60):
            while not await client.envs():
                await asyncio.sleep(0.1)
            answers = [str(number) * 500 for number in range(10)]
            items = [{"response": answer, "answer": answer} for answer in answers]
            verdicts = await client.verify("Equal", items)
            assert [verdict.outcome for verdict in verdicts] == ["correct"] * 10
            with pytest.raises(ProblemError, match="too_large"):
                await client.verify("Equal", [{"response": "x" * 5000, "answer": ""}])
