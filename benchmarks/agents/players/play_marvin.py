"""marvin: a task with a tool, and a structured result."""
# /// script
# dependencies = ["marvin"]
# ///

import marvin
import parts
from pydantic import BaseModel
from pydantic_ai.models.openai import OpenAIChatModel


class Total(BaseModel):
    """The sum."""

    total: int


def agent():
    return marvin.Agent(
        model=OpenAIChatModel(parts.MODEL), tools=[parts.add], instructions=parts.INSTRUCTIONS
    )


parts.play(
    tools=lambda: agent().run(parts.QUESTION),
    structured=lambda: marvin.run(parts.QUESTION, result_type=Total, agents=[agent()]),
)
