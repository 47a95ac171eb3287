"""camel-ai: its chat agent, plain, streaming and with a structured reply."""
# players:
# camel = ["camel-ai", "mcp<2"]

import parts
from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType


def agent(**settings):
    model = ModelFactory.create(
        model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
        model_type=parts.MODEL,
        url=parts.BASE_URL,
        api_key=parts.KEY,
        model_config_dict=settings,
    )
    return ChatAgent(parts.INSTRUCTIONS, model=model, tools=[FunctionTool(parts.add)])


def stream():
    return [*agent(stream=True).step(parts.QUESTION)][-1].msg.content


parts.play(
    tools=lambda: agent().step(parts.QUESTION).msg.content,
    stream=stream,
    structured=lambda: agent().step(parts.QUESTION, response_format=parts.Total).msg.parsed,
)
