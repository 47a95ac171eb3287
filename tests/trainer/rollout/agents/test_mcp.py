"""An environment's tools over MCP: messages are answered in form."""

import asyncio
from types import SimpleNamespace

import pytest

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.table import FORMATS, format_named
from rollgym.trainer.records.trajectory import Trajectory, Turn
from rollgym.trainer.rollout.agents.environment import EpisodeEnvironment, mcp_answer
from rollgym.trainer.tasks.task import Task

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("arguments", [{}, {"a": 1}, {"text": "two\nlines", "deep": {"b": [1, None]}}])
def test_calls_are_written_as_environments_read_them(name, arguments):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "text": {"type": "string"}, "deep": {"type": "object"}},
    }
    reading = format_named(name).read(format_named(name).write([ToolCall("add", arguments)]), {"add": schema})
    assert [(call.name, dict(call.arguments)) for call in reading.calls] == [("add", arguments)]
    assert not reading.faults


class Session:
    """A session of an environment with one tool, which pays 1 for a call of it and then ends."""

    env = SimpleNamespace(metadata={}, kind="episodic")

    def __init__(self, call_format):
        self._format = call_format
        self.actions = []

    async def reset(self, seed, options):
        return "Add!", {
            "instruction": "Long rules.",
            "rules": "Rules.",
            "tools": [TOOL],
            "call_format": self._format,
        }

    async def step(self, action):
        self.actions.append(action)
        messages = [{"role": "tool", "content": "3"}]
        return "<result>3</result>", 1.0, True, False, {"messages": messages, "success": True}


async def environment_of(call_format="hermes"):
    session = Session(call_format)
    trajectory = Trajectory(Task(0, "Add-v0", seed=0), 0)
    environment = EpisodeEnvironment(session, trajectory)
    await environment.reset()
    return environment, session, trajectory


def request(method, **params):
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


async def test_an_episode_of_tools():
    environment, session, trajectory = await environment_of()
    begun = await mcp_answer(environment, request("initialize", protocolVersion="2025-06-18"))
    assert begun["result"]["protocolVersion"] == "2025-06-18"
    assert begun["result"]["instructions"] == "Rules.\n\nAdd!"
    tools = (await mcp_answer(environment, request("tools/list")))["result"]["tools"]
    assert [tool["name"] for tool in tools] == ["step", "add"]
    call = request("tools/call", name="add", arguments={"a": 1})
    early = await mcp_answer(environment, call)
    assert early["result"]["isError"], "the policy was not asked yet: nobody would learn from the reward"
    trajectory.turns.append(Turn(0, 0, 0, "", ""))
    answer = (await mcp_answer(environment, call))["result"]
    assert answer["content"][0]["text"] == "3\n\n[The episode has ended.]"
    assert session.actions == ['<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>']
    assert trajectory.total_reward == 1.0
    assert (await mcp_answer(environment, call))["result"]["isError"]
    assert len(session.actions) == 1


async def test_steps_that_come_together_are_taken_one_by_one():
    environment, session, trajectory = await environment_of()
    trajectory.turns.append(Turn(0, 0, 0, "", ""))
    results = await asyncio.gather(environment.step("a"), environment.step("b"), return_exceptions=True)
    assert len(session.actions) == 1
    assert results[1].code == "episode_over"


async def test_tools_whose_calls_cannot_be_written_are_not_offered():
    environment, _, _ = await environment_of("smoke-signals")
    tools = (await mcp_answer(environment, request("tools/list")))["result"]["tools"]
    assert [tool["name"] for tool in tools] == ["step"]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ([], -32600),
        ({"method": "ping"}, -32600),
        ({"jsonrpc": "2.0", "id": True, "method": "ping"}, -32600),
        (request("no/such"), -32601),
        (request("tools/call", name="none"), -32602),
        (request("tools/call", name="step", arguments={"action": 5}), -32602),
        (request("tools/call", name="step", arguments=[]), None),
        (request("tools/call", name=5), -32602),
    ],
)
async def test_messages_that_are_wrong_are_answered_in_form(message, code):
    environment, _, _ = await environment_of()
    answer = await mcp_answer(environment, message)
    assert answer["error"]["code"] == (code or -32602)


async def test_notifications_have_no_answer():
    environment, _, _ = await environment_of()
    assert await mcp_answer(environment, {"jsonrpc": "2.0", "method": "notifications/initialized"}) is None
