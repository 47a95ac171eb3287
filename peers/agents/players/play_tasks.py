"""Libraries whose agents are given tasks, with a tool and with a structured result: controlflow, marvin, upsonic."""
# players:
# controlflow = ["controlflow"]
# marvin = ["marvin", "pydantic-ai<1.20", "opentelemetry-api<1.36", "mcp<2"]
# upsonic = ["upsonic", "openai"]

import os

import parts


def controlflow():
    # Its server takes its time on a busy machine.
    os.environ["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "300"
    import controlflow
    import rich.pretty  # which it uses, and imports nowhere

    assert rich.pretty
    controlflow.defaults.model = f"openai/{parts.MODEL}"
    return lambda **fields: controlflow.run(parts.QUESTION, max_llm_calls=4, **fields)


def marvin():
    import marvin
    from pydantic_ai.models.openai import OpenAIChatModel

    def run(tools=(parts.add,), **fields):
        model = OpenAIChatModel(parts.MODEL)
        agent = marvin.Agent(model=model, tools=list(tools), instructions=parts.INSTRUCTIONS)
        return marvin.run(parts.QUESTION, agents=[agent], **fields)

    return run


def upsonic():
    from upsonic import Agent, Task
    from upsonic.tools import tool

    def run(tools=(), result_type=str):
        task = Task(parts.QUESTION, tools=[tool(each) for each in tools], response_format=result_type)
        return Agent(model=f"openai/{parts.MODEL}", name="adder").do(task)

    return run


run = {"controlflow": controlflow, "marvin": marvin, "upsonic": upsonic}[parts.NAME]()
parts.play(tools=lambda: run(tools=[parts.add]), structured=lambda: run(result_type=parts.Total))
