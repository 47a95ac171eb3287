"""instructor: its default mode, and its modes of JSON."""
# players:
# instructor = ["instructor"]

import instructor
import parts
from openai import OpenAI


def ask(mode):
    client = instructor.from_openai(OpenAI(api_key=parts.KEY), mode=mode)
    messages = [{"role": "user", "content": parts.QUESTION}]
    return client.chat.completions.create(
        model=parts.MODEL, messages=messages, response_model=parts.Total, max_retries=1
    )


def stream():
    client = instructor.from_openai(OpenAI(api_key=parts.KEY))
    messages = [{"role": "user", "content": parts.QUESTION}]
    return list(
        client.chat.completions.create_partial(
            model=parts.MODEL, messages=messages, response_model=parts.Total
        )
    )[-1]


parts.play(
    tools=lambda: ask(instructor.Mode.TOOLS),
    stream=stream,
    structured=lambda: ask(instructor.Mode.JSON),
    structured_schema=lambda: ask(instructor.Mode.JSON_SCHEMA),
    markdown=lambda: ask(instructor.Mode.MD_JSON),
)
