"""What agents say to the endpoint, by the `openai` package and by none."""

import openai

from tests.support.agent_policy import (
    tool_tokenizer,
)

TOKENIZER = tool_tokenizer()
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]


def user(text):
    return {"role": "user", "content": text}


class Talk:
    """A running endpoint, a session, and the openai client in it."""

    def __init__(self, endpoint, policy, **session):
        self.endpoint, self.policy = endpoint, policy
        self.key, self.session = endpoint.open(**session)
        self.url = f"{endpoint.url}/s/{self.key}"
        self.openai = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0)

    @property
    def trajectory(self):
        return self.session.trajectory

    async def say(self, messages, **fields):
        return await self.openai.chat.completions.create(model="policy", messages=messages, **fields)
