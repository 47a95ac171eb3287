"""phidata: agno's predecessor, plain, streaming and with a structured reply."""
# /// script
# dependencies = ["phidata", "openai"]
# ///

import parts
from phi.agent import Agent
from phi.model.openai import OpenAIChat
from pydantic import BaseModel


class Total(BaseModel):
    """The sum."""

    total: int


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(parts.add(a, b))


def agent(**fields):
    model = OpenAIChat(id=parts.MODEL, base_url=parts.BASE_URL, api_key=parts.KEY)
    return Agent(model=model, instructions=[parts.INSTRUCTIONS], telemetry=False, **fields)


parts.play(
    tools=lambda: agent(tools=[add]).run(parts.QUESTION).content,
    stream=lambda: "".join(
        str(each.content or "") for each in agent(tools=[add]).run(parts.QUESTION, stream=True)
    ),
    structured=lambda: agent(response_model=Total).run(parts.QUESTION).content.total,
)
