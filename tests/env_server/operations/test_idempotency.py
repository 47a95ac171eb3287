"""Requests that come twice are done once."""

import asyncio
from typing import Any

import pytest

from tests.support.wire import Server, Socket


async def steps_taken(socket: Socket, session_id: str) -> int:
    return len((await socket.call("episode", session_id=session_id))["actions"])


async def test_a_step_already_taken_is_answered_again(server: Server) -> None:
    async with server.socket() as socket:
        made = await socket.make()
        first = await socket.call("step", session_id=made, action="a", episode=0, step=0)
        assert first["step"] == 1
        again = await socket.call("step", session_id=made, action="a", episode=0, step=0)
        assert again == first
        assert await socket.call("step", session_id=made, action="a", step=0) == first
        assert await steps_taken(socket, made) == 1


async def test_the_final_step_is_answered_again(server: Server) -> None:
    async with server.socket() as socket, server.socket() as other:
        made = await socket.make(kwargs={"length": 1})
        last = await socket.call("step", session_id=made, action="a", episode=0, step=0)
        assert last["terminated"]
        assert await other.call("step", session_id=made, action="a", episode=0, step=0) == last


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"step": 0, "action": "b"}, "another action"),
        ({"step": 2}, "next step is 1"),
        ({"episode": 1, "step": 1}, "episode 0"),
        ({"episode": 3}, "episode 0"),
    ],
)
async def test_other_steps_do_not_fit(server: Server, fields: dict[str, Any], detail: str) -> None:
    async with server.socket() as socket:
        made = await socket.make()
        await socket.call("step", session_id=made, action="a", episode=0, step=0)
        problem = (await socket.ask("step", **{"session_id": made, "action": "a", **fields}))["error"]
        assert problem["code"] == "step_mismatch"
        assert detail in problem["detail"]
        assert (problem["episode"], problem["step"]) == (0, 1)
        assert await steps_taken(socket, made) == 1


async def test_a_running_step_is_joined(server: Server) -> None:
    async with server.socket() as socket, server.socket() as other:
        made = await socket.make("SlowCount")
        running = await socket.send("step", session_id=made, action="sleep 0.4", episode=0, step=0)
        await asyncio.sleep(0.1)
        joined = await other.call("step", session_id=made, action="sleep 0.4", episode=0, step=0)
        assert (await socket.answer(running))["ok"] == joined
        assert await steps_taken(socket, made) == 1


async def test_a_running_step_with_another_action_does_not_fit(server: Server) -> None:
    async with server.socket() as socket:
        made = await socket.make("SlowCount")
        running = await socket.send("step", session_id=made, action="sleep 0.3", step=0)
        assert (await socket.ask("step", session_id=made, action="b", step=0))["error"][
            "code"
        ] == "step_mismatch"
        assert (await socket.ask("step", session_id=made, action="b", step=1))["error"]["code"] == "busy"
        assert (await socket.ask("render", session_id=made))["error"]["code"] == "busy"
        assert "ok" in await socket.answer(running)


async def test_a_step_that_failed_fails_again_in_the_same_way(server: Server) -> None:
    async with server.socket() as socket:
        made = await socket.make()
        first = await socket.ask("step", session_id=made, action="raise", episode=0, step=0)
        again = await socket.ask("step", session_id=made, action="raise", episode=0, step=0)
        assert again["error"] == first["error"]
        assert (await socket.ask("step", session_id=made, action="b", step=0))["error"][
            "code"
        ] == "step_mismatch"


async def test_a_step_that_began_an_episode_is_answered_again(server: Server) -> None:
    async with server.socket() as socket:
        made = await socket.make(kwargs={"length": 1})
        step = {"session_id": made, "action": "a", "episode": 0, "step": 0, "autoreset": True}
        first = await socket.call("step", **step)
        assert first["terminated"]
        assert (first["reset"]["episode"], first["reset"]["step"]) == (1, 0)
        assert await socket.call("step", **step) == first
        following = await socket.call("step", session_id=made, action="b", episode=1, step=0)
        assert following["observation"] == "1 b"


async def answered_again_and_gone_on(socket: Socket, step: dict[str, Any]) -> None:
    """A step whose answer never came has its reward, and begins the next episode when it is asked to again."""
    kept = await socket.call("step", **step)
    assert (kept["observation"], kept["reward"], kept["terminated"]) == ("1 a", 1.0, True)
    begun = await socket.call("step", **step, autoreset=True)
    assert (begun["reward"], begun["reset"]["episode"]) == (1.0, 1)


@pytest.mark.parametrize("env_id", ["Count", "SlowCount"])
async def test_a_step_is_kept_where_the_next_episode_could_not_begin(server: Server, env_id: str) -> None:
    async with server.socket() as socket:
        made = await socket.make(env_id, kwargs={"length": 1})
        step = {"session_id": made, "action": "a", "episode": 0, "step": 0}
        failed = await socket.ask("step", **step, autoreset=True, reset={"options": {"raise": True}})
        assert failed["error"]["code"] == "env_error"
        await answered_again_and_gone_on(socket, step)


async def test_a_step_is_kept_where_the_next_episode_was_given_up(server: Server) -> None:
    async with server.socket() as socket:
        made = await socket.make("SlowCount", kwargs={"length": 1})
        step = {"session_id": made, "action": "a", "episode": 0, "step": 0}
        running = await socket.send("step", **step, autoreset=True, reset={"options": {"sleep": 20}})
        while (await socket.call("session", session_id=made))["step"] == 0:
            await asyncio.sleep(0.01)
        await socket.call("cancel", session_id=made)
        assert (await socket.answer(running))["error"]["cancelled"]
        await answered_again_and_gone_on(socket, step)


async def test_a_reset_is_done_once(server: Server) -> None:
    async with server.socket() as socket:
        made = (await socket.call("make", env_id="Count"))["session_id"]
        first = await socket.call("reset", session_id=made, request_id="r1")
        await socket.call("step", session_id=made, action="a")
        assert await socket.call("reset", session_id=made, request_id="r1") == first
        assert await steps_taken(socket, made) == 1, "the episode went on"
        second = await socket.call("reset", session_id=made, request_id="r2")
        assert second["episode"] == 1
        assert await socket.call("reset", session_id=made, request_id="r1") == first


async def test_how_an_episode_began_is_said_again_wherever_it_goes_on(server: Server) -> None:
    async with server.socket() as socket:
        made = (await socket.call("make", env_id="Count", kwargs={"length": 9}))["session_id"]
        again = {"session_id": made, "again": True}
        assert (await socket.ask("reset", **again))["error"]["code"] == "not_reset"
        await socket.call("reset", session_id=made, request_id="r1")
        began = await socket.call("reset", session_id=made, request_id="r2")
        await socket.call("step", session_id=made, action="a")
        assert await socket.call("reset", **again) == began
        episode = await socket.call("episode", session_id=made)
        restored = (await socket.call("restore", episode=episode))["session_id"]
        assert await socket.call("reset", session_id=restored, again=True) == began
        assert [await steps_taken(socket, each) for each in (made, restored)] == [1, 1]
        await socket.call("reset", session_id=made)
        assert (await socket.ask("reset", **again))["error"]["code"] == "not_reset", "no request names it"
        assert (await socket.call("step", session_id=made, action="a"))["step"] == 1, "and it goes on"


async def test_a_running_reset_is_joined(server: Server) -> None:
    async with server.socket() as socket:
        made = (await socket.call("make", env_id="SlowCount"))["session_id"]
        fields = {"session_id": made, "options": {"sleep": 0.3}, "request_id": "r"}
        first = await socket.send("reset", **fields)
        second = await socket.send("reset", **fields)
        assert (await socket.answer(first))["ok"] == (await socket.answer(second))["ok"]
        assert (await socket.call("session", session_id=made))["episode"] == 0


@pytest.mark.parametrize("env_id", ["Count", "SlowCount"])
async def test_a_make_is_done_once(server: Server, env_id: str) -> None:
    async with server.socket() as socket, server.http() as client:
        request = {"env_id": env_id, "count": 2, "reset": {"seed": 5}, "request_id": f"make {env_id}"}
        numbers = [await socket.send("make", **request) for _ in range(3)]
        answers = [(await socket.answer(number))["ok"] for number in numbers]
        assert answers[0] == answers[1] == answers[2]
        assert (await client.post("/v1/sessions", json=request)).json() == answers[0]
        other = await socket.call("make", **{**request, "request_id": f"another {env_id}"})
        assert other["sessions"][0]["session_id"] != answers[0]["sessions"][0]["session_id"]
        for session in answers[0]["sessions"]:
            await socket.call("close", session_id=session["session_id"])
        assert await socket.call("make", **request) == answers[0], "as before, though the sessions are closed"


async def test_a_make_that_failed_may_be_tried_again(server: Server) -> None:
    async with server.socket() as socket:
        request = {"env_id": "Count", "request_id": "again"}
        refused = await socket.ask("make", **request, kwargs={"length": 13})
        assert refused["error"]["code"] == "invalid_kwargs"
        assert "ok" in await socket.ask("make", **request, kwargs={"length": 12})


async def test_forks_and_restores_are_done_once(server: Server) -> None:
    async with server.socket() as socket:
        made = await socket.make()
        fork = await socket.call("fork", session_id=made, count=2, request_id="f")
        assert await socket.call("fork", session_id=made, count=2, request_id="f") == fork
        episode = await socket.call("episode", session_id=made)
        restored = await socket.call("restore", episode=episode, request_id="o")
        assert await socket.call("restore", episode=episode, request_id="o") == restored
