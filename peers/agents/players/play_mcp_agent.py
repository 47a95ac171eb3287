"""mcp-agent: an agent on OpenAI's API with a function as its tool."""
# players:
# mcp_agent = ["mcp-agent[openai]", "mcp<2"]

import parts
from mcp_agent.agents.agent import Agent
from mcp_agent.app import MCPApp
from mcp_agent.config import LoggerSettings, OpenAISettings, Settings
from mcp_agent.workflows.llm.augmented_llm import RequestParams
from mcp_agent.workflows.llm.augmented_llm_openai import OpenAIAugmentedLLM

SETTINGS = Settings(
    execution_engine="asyncio",
    logger=LoggerSettings(transports=["none"], type="none"),
    openai=OpenAISettings(api_key=parts.KEY, base_url=parts.BASE_URL, default_model=parts.MODEL),
)


async def run(ask):
    agent = Agent(name="adder", instruction=parts.INSTRUCTIONS, functions=[parts.add])
    async with MCPApp(name="adding", settings=SETTINGS).run(), agent:
        return await ask(await agent.attach_llm(OpenAIAugmentedLLM))


PARAMS = RequestParams(model=parts.MODEL, max_iterations=4)

parts.play(
    tools=lambda: run(lambda llm: llm.generate_str(parts.QUESTION, PARAMS)),
    structured=lambda: run(lambda llm: llm.generate_structured(parts.QUESTION, parts.Total, PARAMS)),
)
