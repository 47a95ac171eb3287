"""magentic: functions that a model answers, with tools, a stream and a structured reply."""
# /// script
# dependencies = ["magentic"]
# ///

import parts
from magentic import OpenaiChatModel, StreamedStr, prompt, prompt_chain
from pydantic import BaseModel


class Total(BaseModel):
    """The sum."""

    total: int


model = OpenaiChatModel(parts.MODEL, api_key=parts.KEY, base_url=parts.BASE_URL)


@prompt_chain(parts.QUESTION, functions=[parts.add], model=model)
def tools() -> str: ...


@prompt(parts.QUESTION, model=model)
def streamed() -> StreamedStr: ...


@prompt(parts.QUESTION, model=model)
def structured() -> Total: ...


parts.play(tools=tools, stream=lambda: "".join(streamed()), structured=structured)
