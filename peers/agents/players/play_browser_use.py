"""browser-use: its model for OpenAI's API, with the structured reply that its agent asks for (no browser)."""
# players:
# browser_use = ["browser-use"]

import parts
from browser_use.agent.views import AgentOutput
from browser_use.llm import ChatOpenAI, UserMessage
from browser_use.tools.service import Tools

model = ChatOpenAI(model=parts.MODEL, api_key=parts.KEY, base_url=parts.BASE_URL)


async def ask(output=None):
    return (await model.ainvoke([UserMessage(content=parts.QUESTION)], output_format=output)).completion


def actions():
    return ask(AgentOutput.type_with_custom_actions(Tools().registry.create_action_model()))


parts.play(plain=ask, structured=lambda: ask(parts.Total), actions=actions)
