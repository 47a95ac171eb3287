"""claude-agent-sdk: Claude Code, which comes with it, with a tool of ours."""
# players:
# claude_agent_sdk = ["claude-agent-sdk"]

import os
import tempfile

import parts
from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, create_sdk_mcp_server, query, tool


@tool("add", "Adds two numbers", {"a": int, "b": int})
async def add(arguments):
    return {"content": [{"type": "text", "text": str(parts.add(arguments["a"], arguments["b"]))}]}


async def tools():
    options = ClaudeAgentOptions(
        model=parts.MODEL,
        system_prompt=parts.INSTRUCTIONS,
        mcp_servers={"adding": create_sdk_mcp_server("adding", tools=[add])},
        allowed_tools=["mcp__adding__add"],
        tools=[],
        max_turns=4,
        cwd=tempfile.mkdtemp(),
        env={
            "ANTHROPIC_BASE_URL": os.environ["ANTHROPIC_BASE_URL"],
            "ANTHROPIC_API_KEY": "any",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CONFIG_DIR": tempfile.mkdtemp(),
        },
    )
    said = [message async for message in query(prompt=parts.QUESTION, options=options)]
    return next(each.result for each in said if isinstance(each, ResultMessage))


parts.play(tools=tools)
