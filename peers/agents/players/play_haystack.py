"""haystack: its agent, plain and streaming, and a schema as the format of the reply."""
# players:
# haystack = ["haystack-ai"]

import parts
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function


def generator(**fields):
    return OpenAIChatGenerator(model=parts.MODEL, api_base_url=parts.BASE_URL, **fields)


def agent(**fields):
    tool = create_tool_from_function(parts.add)
    return Agent(chat_generator=generator(**fields), tools=[tool], system_prompt=parts.INSTRUCTIONS)


def tools():
    return agent().run([ChatMessage.from_user(parts.QUESTION)])["last_message"].text


def stream():
    done = agent(streaming_callback=lambda chunk: None).run([ChatMessage.from_user(parts.QUESTION)])
    return done["last_message"].text


def structured():
    asked = generator(generation_kwargs={"response_format": parts.Total})
    return asked.run([ChatMessage.from_user(parts.QUESTION)])["replies"][0].text


parts.play(tools=tools, stream=stream, structured=structured)
