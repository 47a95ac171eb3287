"""What the console asks its server for beside the protocol: calls and marks, written as environments read them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import rollgym
from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.calls import read_calls
from rollgym.clients.replies.formats.table import FORMATS
from rollgym.env_server.access.tokens import add_token
from rollgym.envs.core.profiles import PROFILES, said_actions

PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}}
SCHEMAS = {"note": PARAMETERS}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    tokens = tmp_path / "tokens.yaml"
    headers = {"Authorization": f"Bearer {add_token(tokens, 'player', ['play'])}"}
    environments = rollgym.create_app(
        env=["Count=tests.support.served_envs:Count"],
        isolation={"Count": "inline"},
        builtin=False,
        workers=1,
        token_file=tokens,
    )
    transport = httpx.ASGITransport(environments)
    async with (
        environments.lifespan(),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client,
    ):
        yield client


async def written(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    call = {"name": "note", "arguments": {}, "parameters": PARAMETERS}
    return await client.post("/console/written_call", json=call | fields)


@pytest.mark.parametrize("call_format", FORMATS)
@pytest.mark.parametrize(
    "text", ["plain", "12", 'a "quote"\n</tool_call> <tool_call>', "</parameter>\n<parameter=count>"]
)
async def test_what_is_written_is_read_as_it_was_meant(
    client: httpx.AsyncClient, call_format: str, text: str
) -> None:
    arguments = {"text": text, "count": 3}
    reply = await written(client, call_format=call_format, arguments=arguments)
    if call_format == "qwen-xml" and "<parameter=" in text:
        # Its parameters are plain text, which has no other way to write a mark.
        assert reply.status_code == 422
        assert "the format qwen-xml has no form for the call" in reply.json()["detail"]
        return
    assert reply.status_code == 200
    read = read_calls(reply.json()["text"], FORMATS[call_format], SCHEMAS)
    assert read.faults == ()
    assert read.calls == (ToolCall("note", arguments, read.calls[0].id),)


async def test_an_environment_that_names_no_format_reads_hermes(client: httpx.AsyncClient) -> None:
    reply = await written(client, arguments={"text": "a"})
    assert reply.json()["text"].startswith("<tool_call>\n")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"call_format": "morse"}, "call_format: this server knows mistral, qwen-xml, hermes"),
        ({"arguments": 3}, "arguments: Input should be a valid dictionary"),
        ({"argument": {}}, "argument: Extra inputs are not permitted"),
    ],
)
async def test_what_cannot_be_written_is_refused_with_its_reason(
    client: httpx.AsyncClient, fields: dict[str, Any], said: str
) -> None:
    reply = await written(client, **fields)
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request")
    assert said in reply.json()["detail"]


async def test_who_may_not_play_has_nothing_written(client: httpx.AsyncClient) -> None:
    del client.headers["Authorization"]
    assert (await written(client)).status_code == 401


@pytest.mark.parametrize("profile", PROFILES)
async def test_an_action_between_the_marks_of_a_profile_is_read(
    client: httpx.AsyncClient, profile: str
) -> None:
    reply = await client.post("/console/action_marks", json={"profile": profile})
    assert reply.status_code == 200
    marks = reply.json()
    assert said_actions(f"{marks['before']}go up{marks['after']}", PROFILES[profile]) == ["go up"]


async def test_a_profile_of_another_s_environment_has_no_marks(client: httpx.AsyncClient) -> None:
    reply = await client.post("/console/action_marks", json={"profile": "cautious"})
    assert reply.json() == {"before": "", "after": ""}


@pytest.mark.parametrize("depth", [900, 10_000])
async def test_deep_arguments_are_refused(client: httpx.AsyncClient, depth: int) -> None:
    body = f'{{"name": "note", "arguments": {{"text": {"[" * depth}{"]" * depth}}}}}'
    reply = await client.post(
        "/console/written_call", content=body, headers={"Content-Type": "application/json"}
    )
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request")


async def test_it_is_no_part_of_the_protocol(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert not [path for path in paths if path.startswith("/console")]
