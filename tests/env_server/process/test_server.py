"""A server that another application mounts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

import rollgym
from rollgym.env_server.access.tokens import add_token
from rollgym.env_server.common.settings import ConfigurationError
from rollgym.env_server.http.transport.serving import EmbeddedServer
from rollgym.env_server.process.server import bind, url_of

SETTINGS: dict[str, Any] = {
    "env": ["Count=tests.support.served_envs:Count"],
    "isolation": {"Count": "inline"},
    "builtin": False,
    "workers": 1,
}


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """Serve an application as its author would: with uvicorn as it comes."""
    listening = bind("127.0.0.1", 0)
    server = EmbeddedServer(uvicorn.Config(app, lifespan="on", log_config=None))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        async with asyncio.timeout(60):
            while not server.started:
                assert not serving.done()
                await asyncio.sleep(0.01)
        yield url_of("127.0.0.1", listening)
    finally:
        server.should_exit = True
        await serving


def test_a_port_that_is_taken_is_told_in_a_line() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1 port {port}: .*in use"):
            bind("127.0.0.1", port)


def host(environments: Any, *, starts: bool = True) -> Starlette:
    async def own(request: Request) -> PlainTextResponse:
        return PlainTextResponse("the host's own")

    return Starlette(
        routes=[Route("/own", own), Mount("/lab/environments", environments)],
        lifespan=environments.lifespan if starts else None,
    )


async def plays(url: str, token: str | None = None) -> None:
    async with rollgym.EnvClient(url, token=token) as client:
        session = await client.make("Count", kwargs={"length": 2})
        await session.reset(seed=1)
        step = await session.step("a")
        assert (step.reward, step.terminated) == (1.0, False)
        await session.close()


async def test_below_a_prefix(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    token = add_token(tokens, "player", ["play"])
    environments = rollgym.create_app(**SETTINGS, token_file=tokens)
    async with served(host(environments)) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/own")).text == "the host's own"
        await plays(f"{url}/lab/environments", token)
        headers = {"Authorization": f"Bearer {token}"}
        infos = (await client.get("/lab/environments/v1/envs", headers=headers)).json()["envs"]
        assert [info["env_id"] for info in infos] == ["Count"]
        assert "/v1/sessions" in (await client.get("/lab/environments/openapi.json")).json()["paths"]
        page = await client.get("/lab/environments/docs")
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        refused = await client.get("/lab/environments/v1/envs")
        assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
        missing = await client.get("/lab/environments/v1/nothing")
        assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
    # What has ended says so, and can be started again.
    transport = httpx.ASGITransport(environments)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/v1/info")).json()["code"] == "draining"
        async with environments.lifespan():
            assert (await client.get("/v1/info", headers=headers)).status_code == 200
            with pytest.raises(rollgym.ConfigurationError, match="started already"):
                await environments.lifespan().__aenter__()


async def test_by_itself() -> None:
    async with served(rollgym.create_app(**SETTINGS)) as url:
        await plays(url)


async def test_a_host_that_does_not_start_it_is_told() -> None:
    environments = rollgym.create_app(**SETTINGS)
    async with served(host(environments, starts=False)) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.get("/lab/environments/v1/info")
        assert (answer.status_code, answer.json()["code"]) == (503, "draining")
        assert "lifespan" in answer.json()["detail"]


@pytest.mark.parametrize(("address", "status"), [("10.0.0.7", 403), ("::ffff:127.0.0.1", 200), ("::1", 200)])
async def test_without_tokens_it_is_for_this_machine(address: str, status: int) -> None:
    environments = rollgym.create_app(**SETTINGS)
    transport = httpx.ASGITransport(environments, client=(address, 5000))
    async with (
        environments.lifespan(),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        assert (await client.get("/v1/info")).status_code == status


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"port": 80}, "port belongs to a server that is a program"),
        ({"sandbox": "auto"}, "sandbox belongs"),
        ({"max_session": 3}, "did you mean 'max_sessions'"),
        ({"workers": -1}, "workers"),
        ({"env": ["nowhere:Nothing"]}, "nowhere"),
        ({"state_dir": "/proc/state"}, "state_dir: /proc/state cannot be made"),
    ],
)
async def test_what_cannot_be_used_is_said(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(rollgym.ConfigurationError, match=said):
        async with rollgym.create_app(**settings).lifespan():
            pass
