"""verl's own registry and tool agent loop call the tools of an environment of a real server."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollgym.integrations.verl import compute_score, write_run_files
from tests.support.client_server import ServerProcess

pytest.importorskip("pyarrow")
LAKE = {"map": ["SFF", "FFF", "FFG"]}


def rows_of(path: Path) -> list[dict[str, Any]]:
    from pyarrow import parquet

    return parquet.read_table(path).to_pylist()


def test_tasks_have_the_prompt_of_their_seed(server: ServerProcess, tmp_path: Path) -> None:
    tasks, _ = write_run_files(tmp_path / "run", server.url, "FrozenLake-v0", count=2, first_seed=7)
    first, second = rows_of(tasks)
    assert first["extra_info"]["tools_kwargs"] == {"act": {"create_kwargs": {"seed": 7}}}
    assert "frozen lake" in first["prompt"][0]["content"]
    assert first["prompt"] != second["prompt"]


@pytest.mark.parametrize("count", [0, -1])
def test_a_run_without_tasks_is_refused(server: ServerProcess, tmp_path: Path, count: int) -> None:
    with pytest.raises(ValueError, match="at least one task"):
        write_run_files(tmp_path, server.url, "FrozenLake-v0", count=count)


@pytest.mark.parametrize(
    ("env_id", "said"), [("CartPole-v1", "--gymnasium-text"), ("Random-v0", "not deterministic")]
)
def test_what_has_no_prompt_before_the_episode_is_refused(
    server: ServerProcess, tmp_path: Path, env_id: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        write_run_files(tmp_path, server.url, env_id, count=1)


def loop_and_data(tools_path: Path, tools_kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """verl's loop with the tools of a file, and the data of one trajectory; no model is needed to call tools."""
    from verl.experimental.agent_loop.tool_agent_loop import AgentData, ToolAgentLoop
    from verl.tools.tool_registry import initialize_tools_from_config

    loop = object.__new__(ToolAgentLoop)
    loop.tools = {tool.name: tool for tool in initialize_tools_from_config(str(tools_path))}
    loop.max_tool_response_length, loop.tool_response_truncate_side = 1000, "left"
    data = AgentData(
        messages=[], image_data=[], video_data=[], audio_data=None, mm_processor_kwargs=None, metrics={},
        request_id="1", tools_kwargs=tools_kwargs,
    )  # fmt: skip
    return loop, data


async def called(loop: Any, data: Any, name: str, **arguments: Any) -> tuple[str, float]:
    from verl.experimental.agent_loop.tool_parser import FunctionCall

    call = FunctionCall(name=name, arguments=json.dumps(arguments))
    response, reward, _ = await loop._call_tool(call, data.tools_kwargs, data)
    data.tool_rewards.append(reward)
    return response.text, reward


def test_a_trajectory_is_one_episode(server: ServerProcess, tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="verl is installed by .ci/peers, in an environment of its own")

    async def play() -> Any:
        tasks, tools = write_run_files(tmp_path, server.url, "FrozenLake-v0", LAKE, count=1)
        loop, data = loop_and_data(tools, rows_of(tasks)[0]["extra_info"]["tools_kwargs"])
        assert (await called(loop, data, "act", action="Right"))[0] == "_P_\n___\n__G"
        # Two calls of one reply.
        await asyncio.gather(
            called(loop, data, "act", action="Right"), called(loop, data, "act", action="Down")
        )
        assert (await called(loop, data, "act", action="Down"))[0].endswith("The episode is over.")
        assert await called(loop, data, "act", action="Up") == ("The episode is over.", 0.0)
        return data

    data = asyncio.run(play())
    assert compute_score("FrozenLake-v0", "", "", {"tool_rewards": data.tool_rewards}) == 1.0


def test_tools_of_an_environment_share_the_episode(server: ServerProcess, tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="verl is installed by .ci/peers, in an environment of its own")

    async def play() -> list[str]:
        tasks, tools = write_run_files(tmp_path, server.url, "ToolUse-v0", count=1)
        loop, data = loop_and_data(tools, rows_of(tasks)[0]["extra_info"]["tools_kwargs"])
        calls = (
            ("store_set", {"key": "a", "value": "1"}),
            ("store_get", {"key": "a"}),
            ("reply", {"text": "<answer>no</answer>"}),
        )
        return [(await called(loop, data, name, **arguments))[0] for name, arguments in calls]

    said = asyncio.run(play())
    assert said[1] == "1"
    assert said[2].endswith("The episode is over.")


def test_a_trajectory_without_a_seed_is_told(server: ServerProcess, tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="verl is installed by .ci/peers, in an environment of its own")

    async def play() -> str:
        _, tools = write_run_files(tmp_path, server.url, "FrozenLake-v0", count=1)
        loop, data = loop_and_data(tools, {})
        return (await called(loop, data, "act", action="Right"))[0]

    assert "no seed" in asyncio.run(play())
