"""griptape: its agent, plain, streaming and with a structured reply."""
# players:
# griptape = ["griptape[drivers-prompt-openai]"]

import parts
from griptape.artifacts import TextArtifact
from griptape.drivers.prompt.openai import OpenAiChatPromptDriver
from griptape.structures import Agent
from griptape.tools import BaseTool
from griptape.utils.decorators import activity
from schema import Schema


class Adding(BaseTool):
    @activity(config={"description": "Adds two numbers.", "schema": Schema({"a": int, "b": int})})
    def add(self, params: dict) -> TextArtifact:
        return TextArtifact(str(parts.add(**params["values"])))


def agent(stream=False, **fields):
    driver = OpenAiChatPromptDriver(
        model=parts.MODEL, base_url=parts.BASE_URL, api_key=parts.KEY, stream=stream
    )
    return Agent(prompt_driver=driver, **fields)


parts.play(
    tools=lambda: agent(tools=[Adding()]).run(parts.QUESTION).output,
    stream=lambda: agent(stream=True).run(parts.QUESTION).output,
    structured=lambda: agent(output_schema=parts.Total).run(parts.QUESTION).output,
)
