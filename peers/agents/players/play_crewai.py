"""crewai: a crew of one with a tool, and a structured reply."""
# players:
# crewai = ["crewai"]

import parts
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


def crew(stream=False, **fields):
    llm = LLM(model=f"openai/{parts.MODEL}", base_url=parts.BASE_URL, api_key=parts.KEY, stream=stream)
    agent = Agent(
        role="adder",
        goal=parts.INSTRUCTIONS,
        backstory="none",
        llm=llm,
        tools=[tool("add")(parts.add)],
        max_iter=3,
    )
    task = Task(description=parts.QUESTION, expected_output="a number", agent=agent, **fields)
    return Crew(agents=[agent], tasks=[task], verbose=False)


parts.play(
    tools=lambda: crew().kickoff(),
    stream=lambda: crew(stream=True).kickoff(),
    structured=lambda: crew(output_pydantic=parts.Total).kickoff().pydantic,
)
