"""upsonic: its agent, with a tool and a structured reply."""
# /// script
# dependencies = ["upsonic", "openai"]
# ///

import parts
from pydantic import BaseModel
from upsonic import Agent, Task
from upsonic.tools import tool


class Total(BaseModel):
    """The sum."""

    total: int


def run(**fields):
    return Agent(model=f"openai/{parts.MODEL}", name="adder").do(Task(parts.QUESTION, **fields))


parts.play(tools=lambda: run(tools=[tool(parts.add)]), structured=lambda: run(response_format=Total))
