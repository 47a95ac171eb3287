"""Sessions: made, listed, ended, forked, restored; whose they are and how long they live."""

import asyncio
from collections.abc import Iterator

import pytest

from rollgym.clients.protocol.episode import step_digest
from rollgym.clients.protocol.frames import MEDIA_TYPES, dumps, loads
from tests.support.interleaved_envs import DIRECTORY, SERVED
from tests.support.wire import ENVS, INLINE, Server, Socket


async def test_many_are_made_with_one_call(server: Server) -> None:
    async with server.http() as client:
        answer = await client.post("/v1/sessions", json={"env_id": "Count", "count": 3, "reset": {"seed": 4}})
        assert answer.status_code == 201
        made = answer.json()["sessions"]
        assert len({each["session_id"] for each in made}) == 3
        assert all(each["reset"]["observation"] == made[0]["reset"]["observation"] for each in made)
        assert made[0]["action_space"] == {"type": "UnicodeText"}
        closed = await client.post(
            "/v1/sessions/close", json={"session_ids": [each["session_id"] for each in made]}
        )
        assert closed.json() == {"closed": 3}


async def test_the_server_says_which_seed_it_drew(server: Server) -> None:
    async with server.http() as client:
        made = (await client.post("/v1/sessions", json={"env_id": "Count", "reset": {}})).json()
        seed = made["reset"]["seed"]
        again = (await client.post("/v1/sessions", json={"env_id": "Count", "reset": {"seed": seed}})).json()
        assert 0 <= seed < 2**53
        assert again["reset"]["observation"] == made["reset"]["observation"]
        other = (await client.post(f"/v1/sessions/{made['session_id']}/reset")).json()
        assert other["seed"] != seed
        assert other["episode"] == 1


async def test_lists_have_pages(server: Server) -> None:
    async with server.http() as client:
        made = (await client.post("/v1/sessions", json={"env_id": "Arrays", "count": 5})).json()["sessions"]
        ids = sorted(each["session_id"] for each in made)
        seen: list[str] = []
        query: dict[str, str | int] = {"env_id": "Arrays", "limit": 2}
        while True:
            page = (await client.get("/v1/sessions", params=query)).json()
            assert len(page["sessions"]) <= 2
            seen += [each["session_id"] for each in page["sessions"]]
            if "after" not in page:
                break
            query["after"] = page["after"]
        # Other tests leave sessions on this server: the pages hold every session once, in order.
        assert seen == sorted(set(seen))
        assert set(ids) <= set(seen)
        one = (await client.get(f"/v1/sessions/{ids[0]}")).json()
        assert one["env_id"] == "Arrays"
        assert one["episode"] is None
        assert not one["terminated"]
        await client.post("/v1/sessions/close", json={"session_ids": ids})


async def test_a_delete_is_good_for_nothing_too(server: Server) -> None:
    async with server.http() as client:
        made = (await client.post("/v1/sessions", json={"env_id": "Count"})).json()["session_id"]
        for _ in range(2):
            answer = await client.delete(f"/v1/sessions/{made}")
            assert (answer.status_code, answer.content) == (204, b"")
        assert (await client.get(f"/v1/sessions/{made}")).status_code == 410
        assert (await client.delete("/v1/sessions/never-was")).status_code == 204


async def test_close_wins_over_a_running_step(server: Server) -> None:
    async with server.socket() as socket, server.http() as client:
        made = await socket.make("SlowCount")
        running = await socket.send("step", session_id=made, action="sleep 30")
        await asyncio.sleep(0.1)
        assert (await client.delete(f"/v1/sessions/{made}")).status_code == 204
        problem = (await socket.answer(running))["error"]
        assert (problem["code"], problem["reason"]) == ("session_gone", "closed")


async def test_cancel_gives_a_running_step_up(server: Server) -> None:
    async with server.socket() as socket, server.http() as client:
        made = await socket.make("SlowCount")
        running = await socket.send("step", session_id=made, action="sleep 30", step=0)
        await asyncio.sleep(0.1)
        assert (await client.post(f"/v1/sessions/{made}/cancel")).status_code == 202
        problem = (await socket.answer(running))["error"]
        assert problem["code"] == "step_timeout"
        assert problem["cancelled"]
        assert (await socket.ask("step", session_id=made, action="go"))["error"]["code"] == "not_reset"
        assert (await socket.call("reset", session_id=made))["episode"] == 1
        assert (await socket.call("step", session_id=made, action="go"))["step"] == 1
        assert await socket.call("cancel", session_id=made) == {}, "nothing runs"


async def test_a_dead_worker_harms_no_session(server: Server) -> None:
    async with server.socket() as socket:
        made, other = await socket.make("SlowCount"), await socket.make("SlowCount")
        before = await socket.call("step", session_id=other, action="a")
        await socket.ask("step", session_id=made, action="exit")
        after = await socket.call("step", session_id=other, action="b")
        assert (before["step"], after["step"]) == (1, 2)
        assert after["observation"] == "2 b"


@pytest.mark.parametrize("env_id", ["Count", "SlowCount"])
async def test_a_fork_goes_on_from_the_same_point(server: Server, env_id: str) -> None:
    async with server.socket() as socket:
        made = await socket.make(env_id, kwargs={"length": 9})
        await socket.call("step", session_id=made, action="a")
        copies = (await socket.call("fork", session_id=made, count=2))["session_ids"]
        outcomes = [await socket.call("step", session_id=each, action="b") for each in [made, *copies]]
        assert outcomes[0] == outcomes[1] == outcomes[2], "random state included"
        assert outcomes[0]["step"] == 2


async def test_a_fork_with_a_new_seed_differs_and_can_be_rebuilt(server: Server) -> None:
    async with server.socket() as socket:
        made = await socket.make(kwargs={"length": 9})
        await socket.call("step", session_id=made, action="a")
        copies = (await socket.call("fork", session_id=made, count=2, reseed=8))["session_ids"]
        again = (await socket.call("fork", session_id=made, count=2, reseed=8))["session_ids"]
        dice = [
            (await socket.call("step", session_id=each, action="b"))["info"]["dice"]
            for each in [made, *copies, *again]
        ]
        assert len(set(dice[:3])) == 3, "all differ"
        assert dice[1:3] == dice[3:5], "equal requests give equal copies"
        episode = await socket.call("episode", session_id=copies[0])
        restored = (await socket.call("restore", episode=episode))["session_id"]
        following = [await socket.call("step", session_id=each, action="c") for each in (copies[0], restored)]
        assert following[0] == following[1]


async def test_a_session_without_an_episode_has_nothing_to_seed_anew(server: Server) -> None:
    async with server.socket() as socket:
        made = (await socket.call("make", env_id="Count"))["session_id"]
        assert (await socket.ask("fork", session_id=made, reseed=8))["error"]["code"] == "not_reset"
        [copy] = (await socket.call("fork", session_id=made))["session_ids"]
        assert (await socket.call("episode", session_id=copy))["seed"] is None


@pytest.mark.parametrize("env_id", ["Count", "SlowCount"])
async def test_a_portable_episode_is_restored(server: Server, env_id: str) -> None:
    async with server.http() as client:
        made = (
            await client.post(
                "/v1/sessions", json={"env_id": env_id, "kwargs": {"length": 2}, "reset": {"seed": 3}}
            )
        ).json()
        path = f"/v1/sessions/{made['session_id']}"
        await client.post(f"{path}/step", json={"action": "ä"})
        episode = (await client.get(f"{path}/episode")).json()
        assert episode["format"] == 1
        assert (episode["seed"], episode["actions"], len(episode["digests"])) == (3, ["ä"], 1)
        answer = await client.post("/v1/sessions/restore", json={"episode": episode})
        assert answer.status_code == 201
        restored = answer.json()
        assert (restored["episode"], restored["step"]) == (0, 1)
        last = await client.post(
            f"/v1/sessions/{restored['session_id']}/step", json={"action": "ä", "step": 0}
        )
        assert last.json()["observation"] == "1 ä", "also the last answer can be had again"
        steps = [
            (await client.post(f"/v1/sessions/{each}/step", json={"action": "b", "step": 1})).json()
            for each in (made["session_id"], restored["session_id"])
        ]
        assert steps[0] == steps[1]
        assert steps[0]["terminated"]
        over = (await client.get(f"{path}/episode")).json()
        ended = (await client.post("/v1/sessions/restore", json={"episode": over})).json()["session_id"]
        problem = (await client.post(f"/v1/sessions/{ended}/step", json={"action": "c"})).json()
        assert problem["code"] == "episode_over"


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of an environment whose episodes do not end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DIRECTORY, str(tmp_path_factory.mktemp("open")))
        with Server(*SERVED, "--no-builtin") as running:
            yield running


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("way", ["socket", "http"])
async def test_a_long_episode_is_restored(endless: Server, binary: bool, way: str) -> None:
    """So long that it is read and written in pieces, and beside the event loop."""
    steps = 21_000
    episode = {
        "format": 1,
        "env_id": "Inline",
        "env_version": "1",
        "kwargs": {"length": 10**6},
        "episode": 0,
        "seed": 3,
        "options": None,
        "reset_digest": step_digest("begin", 0.0, False, False),
        "actions": ["ä"] * steps,
        "digests": [step_digest(f"{number + 1} ä", 1.0, False, False) for number in range(steps)],
        "reseeds": [[0, 5], [steps, 7]],
    }
    async with endless.socket(binary=binary) as socket, endless.http() as http:
        http.timeout = 60
        if way == "socket":
            restored = await socket.call("restore", episode=episode, request_id=f"one {binary}")
            again = await socket.call("restore", episode=episode, request_id=f"one {binary}")
            assert again["session_id"] == restored["session_id"]
        else:
            kind = MEDIA_TYPES[binary]
            body = dumps({"episode": episode}, binary=binary)
            answer = await http.post("/v1/sessions/restore", content=body, headers={"Content-Type": kind})
            restored = loads(answer.content, binary=binary)
        assert (restored["episode"], restored["step"]) == (0, steps)
        session_id = restored["session_id"]
        assert await socket.call("episode", session_id=session_id) == episode
        assert (await http.get(f"/v1/sessions/{session_id}/episode")).json() == episode
        step = await socket.call("step", session_id=session_id, action="b")
        assert step["observation"] == f"{steps + 1} b"
        await socket.call("close", session_ids=[session_id])
        damaged = {**episode, "digests": [*episode["digests"][:-1], "0"]}
        problem = (await socket.ask("restore", episode=damaged))["error"]
        assert problem["errors"][0]["field"] == f"episode.digests.{steps - 1}"


async def test_an_episode_that_does_not_fit_is_not_restored(server: Server) -> None:
    async with server.socket() as socket:
        made = await socket.make()
        await socket.call("step", session_id=made, action="a")
        episode = await socket.call("episode", session_id=made)
        for change, reason in (
            ({"digests": ["0" * 16]}, "replay_diverged"),
            ({"seed": 2}, "replay_diverged"),
            ({"env_version": "6"}, "replay_diverged"),
            ({"env_id": "Chance"}, "lost"),
        ):
            problem = (await socket.ask("restore", episode={**episode, **change}))["error"]
            assert (problem["code"], problem["reason"]) == ("session_gone", reason), change
        for change, code in (
            ({"env_id": "Nowhere"}, "unknown_env"),
            ({"kwargs": {"data_dir": "/"}}, "invalid_kwargs"),
            ({"options": {"expert": True}}, "forbidden"),
            ({"format": 2}, "invalid_request"),
            ({"actions": "a"}, "invalid_request"),
            # Parts that do not fit together: none may be dropped without a word.
            ({"digests": []}, "invalid_request"),
            ({"digests": [*episode["digests"], "0" * 16]}, "invalid_request"),
            ({"digests": ["no digest"]}, "invalid_request"),
            ({"reset_digest": None}, "invalid_request"),
            ({"seed": None}, "invalid_request"),
            ({"seed": None, "reset_digest": None}, "invalid_request"),
            ({"reseeds": [[5, 1]]}, "invalid_request"),
            ({"reseeds": [[-1, 1]]}, "invalid_request"),
            ({"reseeds": [[1, 1], [0, 1]]}, "invalid_request"),
            ({"reseeds": [[0, 2**53]]}, "invalid_request"),
        ):
            problem = (await socket.ask("restore", episode={**episode, **change}))["error"]
            assert problem["code"] == code, change


async def test_a_session_that_was_never_reset_is_restored_as_one(server: Server) -> None:
    async with server.http() as client:
        made = (await client.post("/v1/sessions", json={"env_id": "Count"})).json()["session_id"]
        episode = (await client.get(f"/v1/sessions/{made}/episode")).json()
        restored = (await client.post("/v1/sessions/restore", json={"episode": episode})).json()
        assert (restored["episode"], restored["step"]) == (None, None)
        path = f"/v1/sessions/{restored['session_id']}"
        assert (await client.post(f"{path}/step", json={"action": "a"})).json()["code"] == "not_reset"
        assert (await client.post(f"{path}/reset", json={})).json()["episode"] == 0


@pytest.mark.parametrize("env_id", ["Count", "SlowCount"])
@pytest.mark.parametrize("binary", [False, True], ids=["json", "msgpack"])
async def test_options_that_cannot_be_written_down_are_refused(
    server: Server, env_id: str, binary: bool
) -> None:
    """They would be in no journal, and the episode could not be rebuilt."""
    async with server.socket(binary=binary) as socket:
        made = await socket.make(env_id)
        await socket.call("step", session_id=made, action="a")
        for options in ({"x": 2**53}, {"x": [{"y": -(2**53)}]}):
            problem = (await socket.ask("reset", session_id=made, seed=2, options=options))["error"]
            assert problem["code"] == "invalid_request"
            again = await socket.ask("make", env_id=env_id, reset={"options": options})
            assert again["error"]["code"] == "invalid_request"
        assert (await socket.call("step", session_id=made, action="b"))["step"] == 2, "unharmed"
        assert (await socket.call("episode", session_id=made))["actions"] == ["a", "b"]


async def test_render(server: Server) -> None:
    async with server.http() as client, server.socket(binary=True) as socket:
        made = await socket.make()
        assert await socket.call("render", session_id=made) == {"frame": "<0>"}
        problem = await client.post(f"/v1/sessions/{made}/render", json={"mode": "human"})
        assert problem.json()["code"] == "invalid_request"
        arrays = (await socket.call("make", env_id="Arrays", reset={}))["session_id"]
        frame = (await socket.call("render", session_id=arrays, mode="rgb_array"))["frame"]
        assert frame["__nd__"][:2] == ["uint8", [2, 2, 3]]
        plain = (await client.post(f"/v1/sessions/{arrays}/render", json={})).json()["frame"]
        assert isinstance(plain["__nd__"][2], str)


async def test_expert_actions_need_a_setting() -> None:
    with Server(*ENVS, *INLINE, "--allow-expert") as server:
        async with server.http() as client:
            answer = await client.post(
                "/v1/sessions", json={"env_id": "Count", "reset": {"options": {"expert": True}}}
            )
            assert answer.json()["reset"]["info"]["expert"] is True
            assert 'rollgym_expert_resets_total{env_id="Count"} 1.0' in (await client.get("/metrics")).text


async def gone_reason(socket: Socket, session_id: str) -> str:
    """Wait until a session is gone, and say why."""
    async with asyncio.timeout(10):
        while True:
            answer = await socket.ask("info")
            assert "ok" in answer
            if answer["ok"]["capacity"]["sessions"] == 0:
                problem = (await socket.ask("session", session_id=session_id))["error"]
                assert problem["code"] == "session_gone"
                return str(problem["reason"])
            await asyncio.sleep(0.05)


async def test_unused_sessions_are_evicted() -> None:
    with Server(*ENVS, *INLINE, "--linger-s", "0.3", "--idle-timeout-s", "1") as server:
        async with server.socket() as watcher:
            async with server.socket() as socket:
                lingering = await socket.make()
            assert await gone_reason(watcher, lingering) == "evicted"

        async with server.http() as client, server.socket() as watcher:
            made = (await client.post("/v1/sessions", json={"env_id": "Count"})).json()["session_id"]
            assert await gone_reason(watcher, made) == "evicted"
            short = {"env_id": "Count", "idle_timeout_s": 0.2}
            made = (await client.post("/v1/sessions", json=short)).json()["session_id"]
            assert await gone_reason(watcher, made) == "evicted"
            problem = (await client.post(f"/v1/sessions/{made}/step", json={"action": ""})).json()
            assert problem["code"] == "session_gone"


async def test_a_session_lives_while_a_socket_or_a_step_uses_it() -> None:
    with Server(*ENVS, *INLINE, "--linger-s", "0.4", "--idle-timeout-s", "5") as server:
        async with server.socket() as second:
            async with server.socket() as first:
                made = await first.make("SlowCount")
                await second.call("session", session_id=made)
            await asyncio.sleep(0.8)
            assert (await second.call("session", session_id=made))["step"] == 0, "the second socket keeps it"
            running = await second.send("step", session_id=made, action="sleep 1", step=0)
            await asyncio.sleep(0.1)
        async with server.socket() as third:
            joined = await third.call("step", session_id=made, action="sleep 1", step=0)
            assert joined["step"] == 1, "the step went on without its socket"
            assert running
