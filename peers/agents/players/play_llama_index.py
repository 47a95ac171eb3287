"""llama-index: an agent of functions, which streams by itself, and structured prediction."""
# players:
# llama_index = ["llama-index-core", "llama-index-llms-openai-like"]

import parts
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model=parts.MODEL,
    api_base=parts.BASE_URL,
    api_key=parts.KEY,
    is_chat_model=True,
    is_function_calling_model=True,
)


async def tools():
    agent = FunctionAgent(tools=[parts.add], llm=llm, system_prompt=parts.INSTRUCTIONS)
    return await agent.run(parts.QUESTION)


async def stream():
    return await parts.joined(await llm.astream_complete(parts.QUESTION), lambda each: each.delta)


async def react():
    return await ReActAgent(tools=[parts.add], llm=llm).run(parts.QUESTION)


async def structured():
    return await llm.astructured_predict(parts.Total, PromptTemplate(parts.QUESTION))


parts.play(tools=tools, stream=stream, react=react, structured=structured)
