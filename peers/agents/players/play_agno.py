"""agno, and phidata before it: its agent, plain, streaming and with a structured reply."""
# players:
# agno = ["agno", "openai"]
# phidata = ["phidata", "openai"]

import parts

if parts.NAME == "agno":
    from agno.agent import Agent
    from agno.models.openai import OpenAIChat

    add, STRUCTURED = parts.add, {"output_schema": parts.Total}
else:
    from phi.agent import Agent
    from phi.model.openai import OpenAIChat

    STRUCTURED = {"response_model": parts.Total}

    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        return str(parts.add(a, b))


def agent(**fields):
    model = OpenAIChat(id=parts.MODEL, base_url=parts.BASE_URL, api_key=parts.KEY)
    return Agent(model=model, instructions=[parts.INSTRUCTIONS], telemetry=False, **fields)


def stream():
    said = agent(tools=[add]).run(parts.QUESTION, stream=True)
    return "".join(str(each.content or "") for each in said)


parts.play(
    tools=lambda: agent(tools=[add]).run(parts.QUESTION).content,
    stream=stream,
    structured=lambda: agent(**STRUCTURED).run(parts.QUESTION).content.total,
)
