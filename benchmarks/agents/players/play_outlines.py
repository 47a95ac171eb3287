"""outlines: a reply, a stream and a structured reply, through its model for OpenAI's API."""
# /// script
# dependencies = ["outlines[openai]"]
# ///

import openai
import outlines
import parts
from pydantic import BaseModel


class Total(BaseModel):
    """The sum."""

    total: int


model = outlines.from_openai(openai.OpenAI(api_key=parts.KEY), parts.MODEL)

parts.play(
    plain=lambda: model(parts.QUESTION),
    stream=lambda: "".join(model.stream(parts.QUESTION)),
    structured=lambda: model(parts.QUESTION, Total),
)
