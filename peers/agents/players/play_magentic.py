"""magentic: functions that a model answers, with tools, a stream and a structured reply."""
# players:
# magentic = ["magentic"]

import parts
from magentic import OpenaiChatModel, StreamedStr, prompt, prompt_chain

model = OpenaiChatModel(parts.MODEL, api_key=parts.KEY, base_url=parts.BASE_URL)


@prompt_chain(parts.QUESTION, functions=[parts.add], model=model)
def tools() -> str: ...


@prompt(parts.QUESTION, model=model)
def streamed() -> StreamedStr: ...


@prompt(parts.QUESTION, model=model)
def structured() -> parts.Total: ...


parts.play(tools=tools, stream=lambda: "".join(streamed()), structured=structured)
