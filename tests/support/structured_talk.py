"""Agents that say what replies must look like, by the libraries of OpenAI and Anthropic."""

from contextlib import asynccontextmanager
from typing import Literal

import anthropic
import openai
from pydantic import BaseModel

from rollgym.trainer.inference.base import SamplingParams
from rollgym.trainer.rollout.prompts import ChatRenderer
from tests.support.agent_policy import (
    LoggedClient,
    ScriptedPolicy,
    assert_recorded,
    endpoint_of,
    service_of,
    tool_tokenizer,
)
from tests.support.agent_talk import user

TOKENIZER = tool_tokenizer()
SCHEMA = {
    "type": "object",
    "properties": {"move": {"enum": ["Left", "Right"]}, "sure": {"type": "boolean"}},
    "required": ["move", "sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "move", "strict": True, "schema": SCHEMA}}


class Move(BaseModel):
    move: Literal["Left", "Right"]
    sure: bool


class Talk:
    def __init__(self, endpoint, client):
        key, self.session = endpoint.open()
        self.log, self.url = client.log, f"{endpoint.url}/s/{key}"
        self.openai = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=self.url, api_key="any", max_retries=0)

    async def say(self, **fields):
        return await self.openai.chat.completions.create(
            model="policy", messages=[user("Where to?")], **fields
        )


@asynccontextmanager
async def talk(client, **service):
    logged = client if isinstance(client, ScriptedPolicy) else LoggedClient(client)
    async with endpoint_of(service_of(logged, TOKENIZER, **service)) as endpoint:
        one = Talk(endpoint, logged)
        yield one
        await one.openai.close()
        await one.anthropic.close()
    assert_recorded(one.session.trajectory, one.log)


def sampling(**changes):
    ends = ChatRenderer(TOKENIZER).stop_token_ids
    return {"sampling": SamplingParams(400, stop_token_ids=ends, **changes), "max_length": 1024}
