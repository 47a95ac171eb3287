"""`roll-env` and servers that answer garbage: a line that says so, and never a traceback."""

import time
from contextlib import nullcontext
from pathlib import Path

import orjson
import pytest

from rollgym.clients.cli import registering
from rollgym.clients.protocol.episode import step_digest
from rollgym.clients.protocol.messages import RegisterReply
from tests.support.garbling_server import GARBAGE, GOOD, GarblingServer, HttpSaying
from tests.support.roll_env import roll_env

EPISODE = GOOD["episode"] | {
    "reset_digest": step_digest("go", 0.0, False, False),
    "actions": ["go"],
    "digests": ["0" * 16],
}


@pytest.mark.parametrize(
    ("op", "command", "stdin"),
    [
        ("envs", ("list",), ""),
        ("envs", ("show", "Good-v0"), ""),
        ("make", ("play", "Good-v0"), ""),
        ("reset", ("play", "Good-v0"), ""),
        ("step", ("play", "Good-v0"), "go\n"),
        ("episode", ("play", "Good-v0"), ":save saved.json\n"),
        ("reset", ("bench", "Good-v0", "--seconds", "0.01"), ""),
        ("step", ("bench", "Good-v0", "--seconds", "0.01", "--batch"), ""),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else None,
)
def test_garbage_is_told(garbling: GarblingServer, op: str, command: tuple[str, ...], stdin: str) -> None:
    for answer in GARBAGE:
        garbling.answers[op] = answer
        done = roll_env(*command, "--url", garbling.url, stdin=stdin)
        assert done.returncode in (1, 2), done
        assert done.stderr.startswith(f"roll-env {command[0]}: "), done
        assert "server's answer" in done.stderr


def test_a_schema_of_another_form_is_told(garbling: GarblingServer) -> None:
    for properties in ([1], "no", {"size": 5}, {"size": {"default": 4, "type": {}, "enum": 3}}):
        garbling.answers["envs"] = GOOD["envs"] | {"kwargs_schema": {"properties": properties}}
        done = roll_env("show", "Good-v0", "--url", garbling.url)
        assert done.returncode in (0, 1)


@pytest.mark.parametrize("op", ["make", "reset", "step"])
def test_a_replay_says_that_the_answer_was_garbage(garbling: GarblingServer, tmp_path: Path, op: str) -> None:
    path = tmp_path / "episode.json"
    path.write_bytes(orjson.dumps(EPISODE))
    garbling.answers[op] = [1]
    done = roll_env("replay", str(path), "--url", garbling.url, "--json")
    assert done.returncode == 1
    if op == "make":
        assert "server's answer to 'make' cannot be read" in done.stderr
    else:
        verdict = orjson.loads(done.stdout)
        assert verdict["result"] == "failed"
        assert verdict["detail"].startswith(f"the server's answer to '{op}' cannot be read")


def test_a_verdict_of_another_form_is_told(garbling: GarblingServer, tmp_path: Path) -> None:
    path = tmp_path / "item.json"
    path.write_text('{"response": "x"}')
    for answer in GARBAGE:
        garbling.answers["verify"] = answer
        done = roll_env("verify", "Good-v0", str(path), "--url", garbling.url)
        assert (done.returncode, "server's answer" in done.stderr) == (1, True), done


REGISTER = ("Env", "http://127.0.0.1:9", "--protocol", "http")
PAGES = [b"<html>Welcome</html>", b"", b"\xff\xfe", b"[" * 100_000, b"NaN"]
SHAPES = [
    *(b"null", b"5", b"[]", b"{}", b'"no"', b'{"registration_id": 5, "env_id": "Env", "expires_at": 1}'),
    *(
        b'{"registration_id": "r", "env_id": "Env", "expires_at": "%s"}' % number
        for number in (b"NaN", b"inf", b"x")
    ),
    *(
        b'{"registration_id": "r", "env_id": "Env", "expires_at": 1, "ttl_s": %s}' % ttl
        for ttl in (b"0", b"-1", b'"x"')
    ),
]


@pytest.mark.parametrize("status", [200, 201, 404, 502])
def test_what_is_no_gateway_registers_nothing(status: int) -> None:
    for body in PAGES + (SHAPES if status < 400 else []):
        with HttpSaying({("POST", "/v1/envs"): (status, body)}) as gateway:
            done = roll_env("register", *REGISTER, "--gateway", gateway.url)
        assert done.returncode in (1, 2), done
        assert done.stderr.startswith("roll-env register: "), (body, done)
        assert done.stdout == ""


def test_a_probe_whose_report_is_garbage_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = [b"null", b"5", b'"no"', b"[5]", b"[{}]", b'[{"check": 5, "ok": true, "detail": ""}]']
    for report in reports:
        problem = b'{"code": "probe_failed", "detail": "", "report": %s}' % report
        good = b'{"registration_id": "r", "env_id": "Env", "expires_at": 1, "report": %s}' % report
        for answer in ((422, problem), (201, good)):
            with HttpSaying({("POST", "/v1/envs"): answer}) as gateway:
                monkeypatch.setattr(
                    registering, "LocalServer", lambda _, gateway=gateway: nullcontext(gateway)
                )
                done = roll_env("probe", *REGISTER)
            assert (done.returncode, done.stderr.startswith("roll-env probe: ")) == (1, True), (answer, done)


@pytest.mark.parametrize("hours", [-1000, -1, 0, 1, 1000])
@pytest.mark.parametrize(
    ("ttl", "asked_s", "pause_s"),
    [(b', "ttl_s": 90', None, 30.0), (b', "ttl_s": 90', 12.0, 30.0), (b"", 12.0, 4.0), (b"", None, 20.0)],
)
def test_heartbeats_come_in_time_whatever_the_clock_of_a_gateway_says(
    hours: int, ttl: bytes, asked_s: float | None, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = b'{"registration_id": "r", "env_id": "Env", "expires_at": %d%s}' % (
        time.time() + 3600 * hours,
        ttl,
    )
    said = {
        ("POST", "/v1/registrations/r/heartbeat"): (200, answer),
        ("DELETE", "/v1/registrations/r"): (204, b""),
    }
    paused: list[float] = []
    with HttpSaying(said) as gateway:

        def pause(seconds: float) -> None:
            paused.append(seconds)
            if len(paused) == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr(time, "sleep", pause)
        with registering._client(gateway.url, None) as client:
            reply = RegisterReply.model_validate_json(answer)
            registering._keep(client, reply, lambda: pytest.fail("nothing was forgotten"), asked_s)
    assert paused == [pause_s] * 3


def test_a_registration_is_kept_through_garbage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as the page of a proxy whose gateway is starting again."""
    heartbeats = [*((200, body) for body in PAGES[:2] + SHAPES), (200, b'{"expires_at": 1, "ttl_s": 1e300}')]
    paused: list[float] = []
    beat = ("POST", "/v1/registrations/r/heartbeat")
    with HttpSaying({beat: heartbeats[0], ("DELETE", "/v1/registrations/r"): (204, b"")}) as gateway:

        def pause(seconds: float) -> None:
            paused.append(seconds)
            if len(paused) > len(heartbeats):
                raise KeyboardInterrupt
            gateway.said[beat] = heartbeats[len(paused) - 1]

        monkeypatch.setattr(time, "sleep", pause)
        with registering._client(gateway.url, None) as client:
            reply = RegisterReply(registration_id="r", env_id="Env", expires_at=time.time(), ttl_s=6.0)
            registering._keep(client, reply, lambda: pytest.fail("nothing was forgotten"))
    said = capsys.readouterr()
    number, *offer, farewell = said.out.splitlines()
    assert (number, farewell) == ("r", "Env takes no new sessions any more")
    assert f"{gateway.url}/console" in offer[-1]
    assert "trying on" in said.err
    assert paused[-1] == 3600.0, "a time that never comes is not waited for as a whole"
