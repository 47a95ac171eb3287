"""openai-agents: its default model, which speaks the Responses API."""
# players:
# openai_agents = ["openai-agents"]

import parts
from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
agent = Agent(
    name="adder", instructions=parts.INSTRUCTIONS, model=parts.MODEL, tools=[function_tool(parts.add)]
)


async def tools():
    return (await Runner.run(agent, parts.QUESTION)).final_output


async def stream():
    streamed = Runner.run_streamed(agent, parts.QUESTION)
    async for _ in streamed.stream_events():
        pass
    return streamed.final_output


async def structured():
    return (await Runner.run(agent.clone(output_type=parts.Total), parts.QUESTION)).final_output


parts.play(tools=tools, stream=stream, structured=structured)
