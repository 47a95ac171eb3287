"""openai: both of its APIs, with a tool, a stream and its own structured output."""
# players:
# openai = ["openai"]

import json

from openai import OpenAI
from parts import INSTRUCTIONS, MODEL, QUESTION, SCHEMA, Total, add, play

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
client = OpenAI(api_key="any")


def tools():
    messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": QUESTION}]
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL]).choices[0].message
    (call,) = first.tool_calls
    result = str(add(**json.loads(call.function.arguments)))
    messages += [first, {"role": "tool", "tool_call_id": call.id, "content": result}]
    return (
        client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
        .choices[0]
        .message.content
    )


def stream():
    messages = [{"role": "user", "content": QUESTION}]
    with client.chat.completions.stream(model=MODEL, messages=messages) as events:
        return events.get_final_completion().choices[0].message.content


def structured():
    messages = [{"role": "user", "content": QUESTION}]
    done = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Total)
    return done.choices[0].message.parsed


def responses():
    tool = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
    first = client.responses.create(model=MODEL, input=QUESTION, tools=[tool])
    call = next(item for item in first.output if item.type == "function_call")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    return client.responses.create(
        model=MODEL, input=[output], previous_response_id=first.id, tools=[tool]
    ).output_text


def structured_responses():
    return client.responses.parse(model=MODEL, input=QUESTION, text_format=Total).output_parsed


play(
    tools=tools,
    stream=stream,
    structured=structured,
    responses=responses,
    structured_responses=structured_responses,
)
