"""pydantic-ai with Anthropic's API."""
# /// script
# dependencies = ["pydantic-ai-slim[anthropic]"]
# ///

import parts
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel


class Total(BaseModel):
    total: int


model = AnthropicModel(parts.MODEL)
agent = Agent(model, instructions=parts.INSTRUCTIONS, tools=[parts.add])


async def tools():
    return (await agent.run(parts.QUESTION)).output


async def stream():
    async with agent.run_stream(parts.QUESTION) as streamed:
        return await parts.joined(streamed.stream_text(delta=True))


async def structured():
    return (await Agent(model, output_type=Total, tools=[parts.add]).run(parts.QUESTION)).output


parts.play(tools=tools, stream=stream, structured=structured)
