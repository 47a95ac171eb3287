"""Requests that open sessions open them once, whichever process they come to, before and after a crash."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.client_server import ServerProcess
from tests.support.fragile_envs import kill
from tests.support.journals import killed_before, offsets
from tests.support.patient_calls import Caller, calls

MODULE = "tests.support.fragile_envs"
ENVS = (
    *("--env", f"Inline={MODULE}:Fragile", "--isolation", "Inline=inline"),
    *("--env", f"Thread={MODULE}:Fragile", "--isolation", "Thread=thread"),
    *("--env", f"Random={MODULE}:Random", "--isolation", "Random=inline"),
    *("--workers", "1", "--log-level", "error"),
)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def server(state: Path) -> Iterator[ServerProcess]:
    """A server that the tests kill, and leave as it was."""
    with ServerProcess([*ENVS, "--state-dir", str(state)]) as running:
        yield running


@pytest.fixture(scope="module")
def pair() -> Iterator[ServerProcess]:
    """A server of two I/O processes; calls are taken by either."""
    with ServerProcess([*ENVS, "--processes", "2"]) as running:
        yield running


def start_anew(server: ServerProcess) -> None:
    """End the server as a crash would, and start it again."""
    server.kill()
    server.start()


async def make(caller: Caller, **fields: Any) -> dict[str, Any]:
    return await caller.call("POST", "/v1/sessions", **fields)


@pytest.mark.parametrize("env_id", ["Inline", "Thread"])
async def test_a_crash_does_not_make_sessions_twice(server: ServerProcess, env_id: str) -> None:
    requests: list[dict[str, Any]] = [
        {"env_id": env_id, "request_id": f"one {env_id}"},
        {"env_id": env_id, "request_id": f"begun {env_id}", "reset": {"seed": 5}},
        {"env_id": env_id, "request_id": f"many {env_id}", "count": 3, "reset": {}, "kwargs": {"length": 9}},
    ]
    async with calls(server) as caller:
        before = await caller.sessions()
        answers = [await make(caller, **fields) for fields in requests]
        assert await caller.sessions() == before + 5
        for _ in range(2):
            start_anew(server)
            for fields, answer in zip(requests, answers, strict=True):
                again = await asyncio.gather(*(make(caller, **fields) for _ in range(2)))
                assert again == [answer, answer]
            assert await caller.sessions() == before + 5
        assert len({seed["reset"]["seed"] for seed in answers[2]["sessions"]}) == 3
        session_id = answers[2]["sessions"][1]["session_id"]
        step = await caller.call("POST", f"/v1/sessions/{session_id}/step", action="a", episode=0, step=0)
        assert step["step"] == 1


async def test_a_crash_does_not_copy_sessions_twice(server: ServerProcess) -> None:
    async with calls(server) as caller:
        player = await caller.begin("Inline")
        await player.step("a")
        copies = {"count": 2, "reseed": 3, "request_id": "copies"}
        forked = await player.ask("fork", **copies)
        episode = await player.look("/episode")
        point = {"episode": episode, "request_id": "point"}
        restored = await caller.call("POST", "/v1/sessions/restore", **point)
        count = await caller.sessions()
        start_anew(server)
        await player.step("b")
        assert await player.ask("fork", **copies) == forked
        assert await caller.call("POST", "/v1/sessions/restore", **point) == restored
        assert await caller.sessions() == count
        for session_id in (*forked["session_ids"], restored["session_id"]):
            assert (await caller.call("GET", f"/v1/sessions/{session_id}"))["step"] == 1


async def test_sessions_that_have_gone_on_are_not_answered_as_new(server: ServerProcess) -> None:
    fields = {"env_id": "Inline", "request_id": "used", "reset": {"seed": 1}}
    async with calls(server) as caller:
        path = f"/v1/sessions/{(await make(caller, **fields))['session_id']}"
        await caller.call("POST", f"{path}/step", action="a")
        start_anew(server)
        again = await make(caller, **fields)
        assert (again["code"], again["episode"], again["step"]) == ("step_mismatch", 0, 1)
        assert (await caller.call("POST", f"{path}/step", action="b", step=1))["step"] == 2


async def test_what_a_crash_lost_is_made_anew(server: ServerProcess, state: Path) -> None:
    """A request whose sessions were being written down, one whose session cannot be rebuilt, one that was closed."""
    async with calls(server) as caller:
        closed = {"env_id": "Inline", "request_id": "closed"}
        random = {"env_id": "Random", "request_id": "random", "reset": {}}
        cut = {"env_id": "Inline", "request_id": "cut", "count": 2}
        first = [await make(caller, **fields) for fields in (closed, random)]
        await caller.call("DELETE", f"/v1/sessions/{first[0]['session_id']}")
        first += (await make(caller, **cut))["sessions"]
        server.kill()
        journal = state / "journal-0.bin"
        content = journal.read_bytes()
        last, end = offsets(content)[-2:]
        journal.write_bytes(killed_before(content, last)[: end - 3])
        server.start()
        anew = [await make(caller, **fields) for fields in (closed, random)]
        anew += (await make(caller, **cut))["sessions"]
        assert not {each["session_id"] for each in first} & {each["session_id"] for each in anew}
        gone = await caller.call("GET", f"/v1/sessions/{first[0]['session_id']}")
        assert (gone["code"], gone["reason"]) == ("session_gone", "closed")


async def test_any_process_knows_what_another_was_asked(pair: ServerProcess) -> None:
    owners = set()
    async with calls(pair) as caller:
        before = await caller.sessions()
        number = 0
        # The kernel deals connections to both, by chance.
        while number < 6 or len(owners) < 2:
            number += 1
            fields = {"env_id": "Inline", "request_id": f"request {number}", "reset": {}}
            answers = [await make(caller, **fields) for _ in range(6)]
            assert answers == [answers[0]] * 6
            owners.add(answers[0]["session_id"].partition(".")[0])
            episode = await caller.call("GET", f"/v1/sessions/{answers[0]['session_id']}/episode")
            point = {"episode": episode, "request_id": f"restore {number}"}
            restored = [await caller.call("POST", "/v1/sessions/restore", **point) for _ in range(6)]
            assert restored == [restored[0]] * 6
        assert await caller.sessions() == before + 2 * number


@pytest.mark.parametrize("limit", [1, 2, 7])
async def test_pages_hold_the_sessions_of_all_processes(pair: ServerProcess, limit: int) -> None:
    async with calls(pair) as caller:
        made: set[str] = set()
        # The kernel deals connections to both, by chance.
        while len(made) < 13 or len({each.partition(".")[0] for each in made}) < 2:
            made.add((await make(caller, env_id="Inline"))["session_id"])
        listed: list[str] = []
        after = ""
        while True:
            page = await caller.call("GET", f"/v1/sessions?limit={limit}{after}")
            found = [each["session_id"] for each in page["sessions"]]
            listed += found
            if "after" not in page:
                break
            assert len(found) == limit
            after = f"&after={found[-1]}"
        # Other tests leave sessions there.
        assert made <= set(listed)
        assert listed == sorted(set(listed))
        assert len(listed) == await caller.sessions()


async def test_any_process_knows_what_another_was_asked_before_it_was_killed(pair: ServerProcess) -> None:
    async with calls(pair) as caller:
        before = await caller.sessions()
        requests = [{"env_id": "Inline", "request_id": f"kill {number}", "reset": {}} for number in range(6)]
        answers = [await make(caller, **fields) for fields in requests]
        for pid in pair.children():
            await kill(pid)
        for fields, answer in zip(requests, answers, strict=True):
            assert await make(caller, **fields) == answer
        assert await caller.sessions() == before + 6
