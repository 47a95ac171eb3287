"""smolagents: calls of tools, and agents that write code."""
# players:
# smolagents = ["smolagents[openai]"]

import parts
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(model_id=parts.MODEL, api_base=parts.BASE_URL, api_key=parts.KEY)
add = tool(parts.add)


def tools():
    return ToolCallingAgent(tools=[add], model=model, max_steps=4, verbosity_level=0).run(parts.QUESTION)


def stream():
    agent = ToolCallingAgent(tools=[add], model=model, max_steps=4, verbosity_level=0, stream_outputs=True)
    return [*agent.run(parts.QUESTION, stream=True)][-1].output


def code():
    return CodeAgent(tools=[add], model=model, max_steps=2, verbosity_level=0).run(parts.QUESTION)


def structured():
    agent = CodeAgent(
        tools=[add], model=model, max_steps=2, verbosity_level=0, use_structured_outputs_internally=True
    )
    return agent.run(parts.QUESTION)


parts.play(tools=tools, stream=stream, code=code, structured=structured)
