"""pydantic-ai: its default output by a tool, and the model's own structured output."""
# /// script
# dependencies = ["pydantic-ai-slim[openai]"]
# ///

import parts
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel


class Total(BaseModel):
    total: int


model = OpenAIChatModel(parts.MODEL)
agent = Agent(model, instructions=parts.INSTRUCTIONS, tools=[parts.add])


async def tools():
    return (await agent.run(parts.QUESTION)).output


async def stream():
    async with agent.run_stream(parts.QUESTION) as streamed:
        return await parts.joined(streamed.stream_text(delta=True))


async def structured():
    return (await Agent(model, output_type=Total, tools=[parts.add]).run(parts.QUESTION)).output


async def native():
    return (await Agent(model, output_type=NativeOutput(Total)).run(parts.QUESTION)).output


parts.play(tools=tools, stream=stream, structured=structured, native=native)
