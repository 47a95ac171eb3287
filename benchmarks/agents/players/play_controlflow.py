"""controlflow: a task with a tool, and a structured result."""
# /// script
# dependencies = ["controlflow"]
# ///

import controlflow
import parts
from pydantic import BaseModel


class Total(BaseModel):
    """The sum."""

    total: int


controlflow.defaults.model = f"openai/{parts.MODEL}"

parts.play(
    tools=lambda: controlflow.run(parts.QUESTION, tools=[parts.add], max_llm_calls=4),
    structured=lambda: controlflow.run(parts.QUESTION, result_type=Total, max_llm_calls=4),
)
