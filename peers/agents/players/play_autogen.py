"""autogen-agentchat: its assistant, plain, streaming and with a structured reply."""
# players:
# autogen = ["autogen-agentchat", "autogen-ext[openai]"]

import parts
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": "unknown",
    "structured_output": True,
}


def agent(**fields):
    client = OpenAIChatCompletionClient(model=parts.MODEL, base_url=parts.BASE_URL, model_info=INFO)
    return AssistantAgent(
        "adder", client, system_message=parts.INSTRUCTIONS, reflect_on_tool_use=True, **fields
    )


async def tools():
    return (await agent(tools=[parts.add]).run(task=parts.QUESTION)).messages[-1].content


async def stream():
    events = agent(tools=[parts.add], model_client_stream=True).run_stream(task=parts.QUESTION)
    return [each async for each in events][-1].messages[-1].content


async def structured():
    return (await agent(output_content_type=parts.Total).run(task=parts.QUESTION)).messages[-1].content


parts.play(tools=tools, stream=stream, structured=structured)
