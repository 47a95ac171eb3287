"""agent-framework of Microsoft: its agent, plain, streaming and with a structured reply."""
# players:
# agent_framework = ["agent-framework-core", "agent-framework-openai"]

import parts
from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient


def agent():
    client = OpenAIChatCompletionClient(model=parts.MODEL, api_key=parts.KEY, base_url=parts.BASE_URL)
    return Agent(client=client, instructions=parts.INSTRUCTIONS, tools=[parts.add])


async def stream():
    return await parts.joined(agent().run(parts.QUESTION, stream=True), lambda each: each.text)


async def structured():
    return (await agent().run(parts.QUESTION, options={"response_format": parts.Total})).value


parts.play(tools=lambda: agent().run(parts.QUESTION), stream=stream, structured=structured)
