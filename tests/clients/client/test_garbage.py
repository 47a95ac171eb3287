"""Servers and proxies that answer garbage: whoever asks is told so in a typed error, whatever was asked."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from gymnasium.vector import AutoresetMode

from rollgym.clients.client.client import EnvClient
from rollgym.clients.client.env import RemoteEnv
from rollgym.clients.client.session import EnvSession
from rollgym.clients.client.vector import RemoteVectorEnv
from rollgym.clients.client.verifier import RemoteVerifier
from rollgym.clients.measuring.metrics import sums_of_metrics
from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.episode import PortableEpisode
from rollgym.clients.protocol.errors import ProblemError
from tests.support.garbling_server import GARBAGE, GOOD, GarblingServer, HttpSaying

EPISODE = PortableEpisode.model_validate(GOOD["episode"])
ODD = [*GARBAGE, {"ok": {}}, {"session_ids": "ab", "sessions": "ab", "closed": "1"}]
DEEP: Any = {"__bytes__": []}
for _ in range(300):
    DEEP = [DEEP]
WRONG: list[Any] = [None, True, -1, 1e300, "x", [], [[]], {}, {"a": {}}, DEEP]

Ask = Callable[[EnvClient, EnvSession], Awaitable[Any]]
ASKS: Mapping[str, Ask] = {
    "info": lambda client, _: client.info(),
    "envs": lambda client, _: client.envs(),
    "make": lambda client, _: client.make_many("Good-v0", 2),
    "reset": lambda _, session: session.reset(1),
    "step": lambda _, session: session.step("go", autoreset=True),
    "render": lambda _, session: session.render(),
    "episode": lambda _, session: session.episode_record(),
    "fork": lambda _, session: session.fork(),
    "restore": lambda client, _: client.restore(EPISODE),
    "session": lambda _, session: session.resume(EPISODE, ("former", 0)),
    "close": lambda client, session: client.close_sessions([session]),
    "verify": lambda client, _: client.verify("Good-v0", [{"response": "x"}]),
}


async def ask(server: GarblingServer, op: str, answer: Any) -> Any:
    """Ask for an operation that is answered like this, in a session that was well until then."""
    async with EnvClient(server.url, timeout_s=5) as client:
        session = await client.make("Good-v0")
        if op != "reset":
            await session.reset(1)
        server.answers[op] = answer
        try:
            return await ASKS[op](client, session)
        finally:
            server.answers.clear()


@pytest.mark.parametrize("op", ASKS)
async def test_an_answer_of_another_form_is_a_typed_error(garbling: GarblingServer, op: str) -> None:
    assert await ask(garbling, op, GOOD[op] if op not in ("envs", "make") else good_list(op)) is not ...
    for answer in ODD:
        with pytest.raises(DecodeError, match="server"):
            await ask(garbling, op, answer)


def good_list(op: str) -> dict[str, Any]:
    return {"envs": [GOOD["envs"]]} if op == "envs" else {"sessions": [GOOD["make"]] * 2}


@pytest.mark.parametrize("op", ["reset", "step", "render", "episode", "restore", "session"])
async def test_a_member_of_another_form_is_a_typed_error_or_none_at_all(
    garbling: GarblingServer, op: str
) -> None:
    for name in GOOD[op]:
        for wrong in WRONG:
            try:
                result = await ask(garbling, op, GOOD[op] | {name: wrong})
            except (DecodeError, ProblemError):
                continue
            if op == "step":
                _, reward, terminated, truncated, info = result
                kinds = (type(reward), type(terminated), type(truncated), type(info))
                assert kinds == (float, bool, bool, dict)


async def test_a_client_is_closed_whatever_is_answered_to_that(garbling: GarblingServer) -> None:
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with EnvClient(garbling.url, timeout_s=5) as client:
        session = await client.make("Good-v0")
        garbling.answers.update(close="no", fork=[5])
        with pytest.raises(DecodeError):
            await session.fork()
    assert client._pool.processes == []
    assert complaints == []


def test_environments_that_plain_code_uses_say_so_too(garbling: GarblingServer) -> None:
    env = RemoteEnv(garbling.url, "Good-v0", render_mode="ansi", timeout_s=5)
    envs = RemoteVectorEnv(
        garbling.url, "Good-v0", 2, autoreset_mode=AutoresetMode.SAME_STEP, render_mode="ansi", timeout_s=5
    )
    try:
        for answer in ODD:
            garbling.answers.update(reset=answer, render=answer)
            with pytest.raises(DecodeError):
                env.reset(seed=1)
            with pytest.raises(ProblemError, match="internal"):
                envs.reset(seed=1)
            with pytest.raises(DecodeError):
                env.render()
            with pytest.raises(DecodeError):
                envs.render()
        garbling.answers.clear()
        env.reset(seed=1)
        envs.reset(seed=1)
        for answer in [*ODD, *(GOOD["step"] | {"terminated": wrong} for wrong in (None, "yes", 1))]:
            garbling.answers["step"] = answer
            with pytest.raises(DecodeError):
                env.step("go")
            with pytest.raises(ProblemError, match="internal"):
                envs.step(["go", "go"])
    finally:
        garbling.answers.clear()
        env.close()
        envs.close()


@pytest.mark.parametrize("metadata", [{"render_modes": 5}, {"render_modes": "ansi"}, {}])
def test_render_modes_of_another_form_are_none(garbling: GarblingServer, metadata: Any) -> None:
    garbling.answers["envs"] = GOOD["envs"] | {"metadata": metadata}
    for kind in (RemoteEnv, RemoteVectorEnv):
        with pytest.raises(ValueError, match="renders as one of"):
            kind(garbling.url, "Good-v0", render_mode="rgb_array")
        kind(garbling.url, "Good-v0").close()


@pytest.mark.parametrize("answer", ODD)
def test_verdicts_of_another_form_are_a_typed_error(garbling: GarblingServer, answer: Any) -> None:
    garbling.answers["verify"] = answer
    with RemoteVerifier(garbling.url, "Good-v0", timeout_s=5) as verifier, pytest.raises(DecodeError):
        verifier.score([{"response": "x"}])


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
async def test_a_frame_that_is_cut_off_breaks_the_connection(garbling: GarblingServer, encoding: Any) -> None:
    async with EnvClient(garbling.url, encoding=encoding, timeout_s=0.3) as client:
        session = await client.make("Good-v0")
        garbling.answers["reset"] = b"\x82\xa2id" if encoding == "msgpack" else b'{"id": 3, "ok": {'
        with pytest.raises(ConnectionError):
            await session.reset(1)


@pytest.mark.parametrize("status", [200, 404, 502])
async def test_a_proxys_page_is_no_server(status: int) -> None:
    with (
        HttpSaying({("GET", "/"): (status, b"<html>Welcome</html>")}) as proxy,
        pytest.raises(ConnectionError),
    ):
        await EnvClient(proxy.url, connect_timeout_s=0.2).info()


@pytest.mark.parametrize(
    "body", [b"<html>", b"\xff\xfe", b"steps 5\nsteps abc\n", b"steps 1e999\n", b"steps NaN\n", b""]
)
def test_metrics_of_another_form_tell_nothing(body: bytes) -> None:
    with HttpSaying({("GET", "/metrics"): (200, body)}) as server:
        assert sums_of_metrics(server.url, None, "steps") == [None]
