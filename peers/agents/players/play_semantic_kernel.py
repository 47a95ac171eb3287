"""semantic-kernel: its chat agent, plain, streaming and with a schema as the format of the reply."""
# players:
# semantic_kernel = ["semantic-kernel"]

import parts
from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.functions import KernelArguments, kernel_function


class Adding:
    @kernel_function
    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        return parts.add(a, b)


def agent(**fields):
    client = AsyncOpenAI(base_url=parts.BASE_URL, api_key=parts.KEY)
    service = OpenAIChatCompletion(ai_model_id=parts.MODEL, async_client=client)
    return ChatCompletionAgent(service=service, instructions=parts.INSTRUCTIONS, **fields)


async def tools():
    return await agent(plugins=[Adding()]).get_response(parts.QUESTION)


async def stream():
    return await parts.joined(
        agent(plugins=[Adding()]).invoke_stream(messages=parts.QUESTION), lambda each: each.content
    )


async def structured():
    settings = OpenAIChatPromptExecutionSettings(response_format=parts.Total)
    return await agent(arguments=KernelArguments(settings)).get_response(parts.QUESTION)


parts.play(tools=tools, stream=stream, structured=structured)
