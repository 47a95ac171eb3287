"""litellm: a tool, a stream, and a schema as the format of the reply."""
# players:
# litellm = ["litellm"]

import json

import litellm
import parts

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": parts.SCHEMA}}


def ask(messages, **fields):
    return litellm.completion(model=f"openai/{parts.MODEL}", messages=messages, **fields)


def tools():
    messages = [{"role": "user", "content": parts.QUESTION}]
    first = ask(messages, tools=[TOOL]).choices[0].message
    (call,) = first.tool_calls
    result = str(parts.add(**json.loads(call.function.arguments)))
    messages += [first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": result}]
    return ask(messages, tools=[TOOL]).choices[0].message.content


def stream():
    chunks = list(ask([{"role": "user", "content": parts.QUESTION}], stream=True))
    return litellm.stream_chunk_builder(chunks).choices[0].message.content


def structured():
    done = ask([{"role": "user", "content": parts.QUESTION}], response_format=parts.Total)
    return parts.Total.model_validate_json(done.choices[0].message.content)


def messages():
    done = litellm.completion(
        model=f"anthropic/{parts.MODEL}",
        api_base=parts.ANTHROPIC_URL,
        api_key=parts.KEY,
        messages=[{"role": "user", "content": parts.QUESTION}],
    )
    return done.choices[0].message.content


parts.play(tools=tools, stream=stream, structured=structured, messages=messages)
