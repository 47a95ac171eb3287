"""langchain and langgraph on either API: create_agent, and with_structured_output by its default method."""
# players:
# langchain = ["langchain", "langgraph", "langchain-openai"]
# langchain_anthropic = ["langchain", "langgraph", "langchain-anthropic"]

import parts
from langchain.agents import create_agent

if parts.NAME == "langchain":
    from langchain_openai import ChatOpenAI as Chat
else:
    from langchain_anthropic import ChatAnthropic as Chat

model = Chat(model=parts.MODEL)
agent = create_agent(model, tools=[parts.add], system_prompt=parts.INSTRUCTIONS)
ASKED = {"messages": [{"role": "user", "content": parts.QUESTION}]}


async def tools():
    return (await agent.ainvoke(ASKED))["messages"][-1].content


async def stream():
    return await parts.joined(agent.astream(ASKED, stream_mode="messages"), lambda each: each[0].content)


async def structured():
    return await model.with_structured_output(parts.Total).ainvoke(parts.QUESTION)


async def structured_agent():
    asked = create_agent(model, tools=[parts.add], response_format=parts.Total)
    return (await asked.ainvoke(ASKED))["structured_response"]


parts.play(tools=tools, stream=stream, structured=structured, structured_agent=structured_agent)
