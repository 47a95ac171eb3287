"""swarms: its agent, with a tool."""
# players:
# swarms = ["swarms"]

import parts
from swarms import Agent


def run(**fields):
    agent = Agent(
        agent_name="adder",
        system_prompt=parts.INSTRUCTIONS,
        model_name=f"openai/{parts.MODEL}",
        llm_base_url=parts.BASE_URL,
        llm_api_key=parts.KEY,
        max_loops=2,
        print_on=False,
        autosave=False,
        **fields,
    )
    return agent.run(parts.QUESTION)


parts.play(tools=lambda: run(tools=[parts.add]), plain=run)
