"""qwen-agent: its assistant, which streams by itself."""
# players:
# qwen_agent = ["qwen-agent", "soundfile", "python-dateutil", "numpy", "tqdm"]

import json
from typing import ClassVar

import parts
from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool


@register_tool("add")
class Adding(BaseTool):
    description = "Adds two numbers."
    parameters: ClassVar = [
        {"name": "a", "type": "integer", "description": "The first number.", "required": True},
        {"name": "b", "type": "integer", "description": "The second number.", "required": True},
    ]

    def call(self, params, **_):
        return str(parts.add(**json.loads(params)))


def run(**settings):
    llm = {"model": parts.MODEL, "model_server": parts.BASE_URL, "api_key": parts.KEY} | settings
    agent = Assistant(llm=llm, system_message=parts.INSTRUCTIONS, function_list=["add"])
    said = [*agent.run([{"role": "user", "content": parts.QUESTION}])]
    return said[-1][-1]["content"]


parts.play(tools=run, raw=lambda: run(generate_cfg={"use_raw_api": True}))
