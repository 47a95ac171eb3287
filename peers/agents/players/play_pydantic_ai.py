"""pydantic-ai on either API: its default output by a tool, and the model's own structured output."""
# players:
# pydantic_ai = ["pydantic-ai-slim[openai]"]
# pydantic_ai_anthropic = ["pydantic-ai-slim[anthropic]"]

import parts
from pydantic_ai import Agent, NativeOutput

if parts.NAME == "pydantic_ai":
    from pydantic_ai.models.openai import OpenAIChatModel as Model
else:
    from pydantic_ai.models.anthropic import AnthropicModel as Model

model = Model(parts.MODEL)
agent = Agent(model, instructions=parts.INSTRUCTIONS, tools=[parts.add])


async def tools():
    return (await agent.run(parts.QUESTION)).output


async def stream():
    async with agent.run_stream(parts.QUESTION) as streamed:
        return await parts.joined(streamed.stream_text(delta=True))


async def structured():
    return (await Agent(model, output_type=parts.Total, tools=[parts.add]).run(parts.QUESTION)).output


async def native():
    return (await Agent(model, output_type=NativeOutput(parts.Total)).run(parts.QUESTION)).output


parts.play(tools=tools, stream=stream, structured=structured, native=native)
