"""guidance: a chat with its model for OpenAI's API, which streams by itself, and a reply with a schema."""
# /// script
# dependencies = ["guidance", "openai"]
# ///

import guidance
import parts
from guidance import assistant, gen, user
from guidance import json as as_json
from pydantic import BaseModel


class Total(BaseModel):
    """The sum."""

    total: int


def ask(reply):
    lm = guidance.models.OpenAI(parts.MODEL, echo=False, api_key=parts.KEY, base_url=parts.BASE_URL)
    with user():
        lm += parts.QUESTION
    with assistant():
        lm += reply
    return lm["answer"]


parts.play(plain=lambda: ask(gen("answer")), structured=lambda: ask(as_json("answer", schema=Total)))
