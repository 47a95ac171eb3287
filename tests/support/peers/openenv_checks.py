"""What OpenEnv's own validator and tool client find at each environment of a server: the server's URL."""

import asyncio
import json
import sys
import urllib.request
from typing import Any

from openenv.cli._validation import validate_running_environment
from openenv.core.mcp_client import MCPToolClient


async def call_tools(base_url: str) -> None:
    """List the tools, and take an action with one of them, in an episode that was begun on the socket."""
    async with MCPToolClient(base_url=base_url) as env:
        await env.reset(seed=3)
        tools = {tool.name: tool for tool in await env.list_tools()}
        action = tools["take_action"].input_schema["properties"]["action"].get("minimum", "[0]")
        # What is no action of the environment is refused, which is an answer as well.
        refusal = await refused(env, "take_action", action=action)
        assert refusal is None or "action" in refusal, refusal
        refusal = await refused(env, "no_such_tool")
        assert refusal is not None, "a tool that there is not was called"
        assert "Tool not found" in refusal, refusal


async def refused(env: MCPToolClient, name: str, **arguments: Any) -> str | None:
    """Call a tool; why that was refused, if it was."""
    try:
        await env.call_tool(name, **arguments)
    except RuntimeError as error:
        return str(error)
    return None


def check(url: str, env_id: str) -> list[str]:
    """The names of what fails at an environment."""
    base_url = f"{url}/openenv/{env_id}"
    report = validate_running_environment(base_url, timeout_s=30)
    failed = [each["id"] for each in report["criteria"] if not each["passed"]]
    if len(report["criteria"]) != 6 or not report["passed"]:
        failed.append("validate")
    try:
        asyncio.run(call_tools(base_url))
    except Exception as error:  # noqa: BLE001 - whatever is wrong is told of this environment, and the next is tried
        failed.append(f"MCPToolClient: {type(error).__name__}: {error}")
    return failed


if __name__ == "__main__":
    with urllib.request.urlopen(f"{sys.argv[1]}/v1/envs") as listed:
        env_ids = [each["env_id"] for each in json.load(listed)["envs"]]
    faults = {env_id: failed for env_id in env_ids if (failed := check(sys.argv[1], env_id))}
    for env_id, failed in faults.items():
        print(f"{env_id}: {'; '.join(failed)}")
    print(f"openenv: {len(env_ids) - len(faults)} of {len(env_ids)} environments pass")
    sys.exit(bool(faults))
