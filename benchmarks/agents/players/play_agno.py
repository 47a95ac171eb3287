"""agno: its agent, plain, streaming and with a structured reply."""
# /// script
# dependencies = ["agno", "openai"]
# ///

import parts
from agno.agent import Agent
from agno.models.openai import OpenAIChat
from pydantic import BaseModel


class Total(BaseModel):
    total: int


def agent(**fields):
    model = OpenAIChat(id=parts.MODEL, base_url=parts.BASE_URL, api_key=parts.KEY)
    return Agent(model=model, instructions=parts.INSTRUCTIONS, telemetry=False, **fields)


def tools():
    return agent(tools=[parts.add]).run(parts.QUESTION).content


def stream():
    return "".join(
        str(each.content or "") for each in agent(tools=[parts.add]).run(parts.QUESTION, stream=True)
    )


def structured():
    return agent(output_schema=Total).run(parts.QUESTION).content.total


parts.play(tools=tools, stream=stream, structured=structured)
