"""langroid: a task with a tool, which streams by itself."""
# players:
# langroid = ["langroid"]

import langroid as lr
import langroid.language_models as lm
import parts
from langroid.agent.tool_message import ToolMessage


class Add(ToolMessage):
    request: str = "add"
    purpose: str = "To add two numbers <a> and <b>"
    a: int
    b: int

    def handle(self):
        return str(parts.add(self.a, self.b))


def run(functions=True, stream=True):
    llm = lm.OpenAIGPTConfig(
        chat_model=parts.MODEL,
        api_base=parts.BASE_URL,
        api_key=parts.KEY,
        stream=stream,
        chat_context_length=8000,
    )
    config = lr.ChatAgentConfig(
        llm=llm, system_message=parts.INSTRUCTIONS, use_functions_api=functions, use_tools=not functions
    )
    agent = lr.ChatAgent(config)
    agent.enable_message(Add)
    return lr.Task(agent, interactive=False, single_round=False).run(parts.QUESTION, turns=4).content


parts.play(tools=lambda: run(stream=False), stream=run, text=lambda: run(functions=False))
