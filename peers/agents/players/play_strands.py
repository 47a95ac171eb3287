"""strands-agents: its agent, which streams by itself, and its structured output."""
# players:
# strands = ["strands-agents[openai]"]

import parts
from strands import Agent, tool
from strands.models.openai import OpenAIModel

model = OpenAIModel(client_args={"api_key": parts.KEY, "base_url": parts.BASE_URL}, model_id=parts.MODEL)


def agent():
    return Agent(
        model=model, tools=[tool(parts.add)], system_prompt=parts.INSTRUCTIONS, callback_handler=None
    )


def tools():
    return agent()(parts.QUESTION)


async def stream():
    return await parts.joined(agent().stream_async(parts.QUESTION), lambda each: each.get("data"))


def structured():
    return agent()(parts.QUESTION, structured_output_model=parts.Total).structured_output


parts.play(tools=tools, stream=stream, structured=structured)
