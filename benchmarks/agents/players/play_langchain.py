"""langchain and langgraph on OpenAI's API: create_agent, and with_structured_output by its default method."""
# /// script
# dependencies = ["langchain", "langgraph", "langchain-openai"]
# ///

import parts
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Total(BaseModel):
    """The sum."""

    total: int


model = ChatOpenAI(model=parts.MODEL)
agent = create_agent(model, tools=[parts.add], system_prompt=parts.INSTRUCTIONS)
ASKED = {"messages": [{"role": "user", "content": parts.QUESTION}]}


async def tools():
    return (await agent.ainvoke(ASKED))["messages"][-1].content


async def stream():
    return await parts.joined(agent.astream(ASKED, stream_mode="messages"), lambda each: each[0].content)


async def structured():
    return await model.with_structured_output(Total).ainvoke(parts.QUESTION)


async def structured_agent():
    asked = create_agent(model, tools=[parts.add], response_format=Total)
    return (await asked.ainvoke(ASKED))["structured_response"]


parts.play(tools=tools, stream=stream, structured=structured, structured_agent=structured_agent)
