"""ag2: its agent, plain, streaming and with a structured reply."""
# players:
# ag2 = ["ag2[openai]"]

import parts
from ag2 import Agent
from ag2.config import OpenAIConfig


async def run(streaming=False, **fields):
    config = OpenAIConfig(parts.MODEL, api_key=parts.KEY, base_url=parts.BASE_URL, streaming=streaming)
    agent = Agent("adder", parts.INSTRUCTIONS, config=config, **fields)
    return await (await agent.ask(parts.QUESTION)).content()


parts.play(
    tools=lambda: run(tools=[parts.add]),
    stream=lambda: run(streaming=True, tools=[parts.add]),
    structured=lambda: run(response_schema=parts.Total),
)
