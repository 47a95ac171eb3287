"""`roll-env register`, `unregister` and `probe`: environments of other servers, from the command line."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import quote

import httpx

from rollgym.clients.audit.policies import takes_text
from rollgym.clients.checks.report import Finding, Status, print_report
from rollgym.clients.checks.tools import check_tools_of
from rollgym.clients.cli.arguments import UsageError, add_token_argument, read_number
from rollgym.clients.client.answers import member, reading
from rollgym.clients.client.env import RemoteEnv
from rollgym.clients.net.caller import bearer_headers
from rollgym.clients.process.local_server import LocalServer
from rollgym.clients.protocol.addresses import server_parts
from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.errors import RETRY_LATER, ProblemError
from rollgym.clients.protocol.frames import loads
from rollgym.clients.protocol.messages import HeartbeatReply, RegisterReply
from rollgym.clients.protocol.upstream_protocols import ROLLGYM, UPSTREAM_PROTOCOLS

_TIMEOUT_S = 120.0
# A registration that is kept outlives a gateway or a server that is away for a while.
_AGAIN_S = 2.0
_LONGEST_PAUSE_S = 3600.0
# The time to live at a gateway that does not report one, unless another was requested.
_USUAL_TTL_S = 60.0
_MAY_PASS = RETRY_LATER | {"probe_failed"}
# The addresses that a server started for a probe may connect to: the user of the command is responsible for the URL.
_ANYWHERE = ("--gateway", "--allow-network", "loopback", "--allow-network", "private")


def add_parsers(commands: Any) -> None:
    """Add the commands to the parser."""
    register = commands.add_parser("register", help="add an environment of another server to a gateway")
    _add_server(register)
    _add_gateway(register)
    register.add_argument(
        "--weight", type=read_number, default=1.0, help="Share of new sessions (default 1)."
    )
    register.add_argument("--ttl-s", type=read_number, help="How long it lives past its last heartbeat.")
    register.add_argument("--description", help="What lists show.")
    register.add_argument(
        "--keep",
        action="store_true",
        help="Send heartbeats until stopped (Ctrl-C or SIGTERM), then unregister.",
    )
    register.set_defaults(run=run_register)
    unregister = commands.add_parser("unregister", help="end a registration at a gateway")
    unregister.add_argument("registration_id", help="What `register` printed.")
    _add_gateway(unregister)
    unregister.set_defaults(run=run_unregister)
    probe = commands.add_parser("probe", help="ask a server what a gateway asks before it offers it")
    _add_server(probe)
    probe.add_argument("--json", action="store_true", help="Print the report as JSON.")
    probe.set_defaults(run=run_probe)


def run_register(options: argparse.Namespace) -> int:
    """Register, and keep the registration if requested."""
    if options.keep:
        # A container's stop is as good as Ctrl-C, and a shell's background ignores that.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
    with _client(options.gateway, options.token) as client:
        given = {"weight": options.weight, "ttl_s": options.ttl_s, "description": options.description}
        more = {name: value for name, value in given.items() if value is not None}
        reply = _register(client, options, more)
        if options.keep:
            _keep(client, reply, lambda: _register(client, options, more), options.ttl_s)
            return 0
        print(reply.registration_id, flush=True)
        _print_offer(reply, client, f"for {_ttl_s(reply, options.ttl_s):.0f} s; --keep sends heartbeats")
    return 0


def run_unregister(options: argparse.Namespace) -> int:
    """End a registration; its sessions continue."""
    with _client(options.gateway, options.token) as client:
        _call(client, "DELETE", f"/v1/registrations/{options.registration_id}")
    print("it takes no new sessions any more")
    return 0


def run_probe(options: argparse.Namespace) -> int:
    """Register with a gateway that is started for this, show its findings, and call the environment's tools."""
    with LocalServer(_ANYWHERE) as server, _client(server.url, None) as client:
        try:
            findings = _findings_of(_register(client, options, {}).report)
            findings += _tools_at(server.url, options.env_id)
        except ProblemError as problem:
            if problem.code != "probe_failed":
                raise
            findings = _findings_of(problem.extra.get("report"))
    return print_report(f"{options.env_id} at {options.server}", findings, as_json=options.json)


def _findings_of(report: Any) -> list[Finding]:
    """Return the findings of a gateway's probe.

    Raises:
        DecodeError: The report has another form.
    """
    with reading("register"):
        return [
            Finding(
                member(check, "check", str),
                Status.PASS if check["ok"] else Status.FAIL,
                member(check, "detail", str),
            )
            for check in report
        ]


def _tools_at(gateway: str, env_id: str) -> list[Finding]:
    """Call the tools of an environment at the gateway; skip an environment without tools."""
    try:
        with closing(RemoteEnv(gateway, env_id)) as env:
            if env.metadata.get("kind") == "stateless" or not takes_text(env.action_space):
                return []
            return list(check_tools_of(env))
    except ProblemError as problem:
        return [Finding("an episode begins", Status.FAIL, str(problem))]


def _print_offer(reply: RegisterReply, client: httpx.Client, how_long: str) -> None:
    """Print where an environment is offered, and the commands that use it there."""
    env_id, url = reply.env_id, str(client.base_url).rstrip("/")
    named = f"{shlex.quote(env_id)} --url {url}"
    print(f"{env_id} is offered at {url} {how_long}")
    print(
        f"next: `roll-env show {named}` shows what it is, `roll-env play {named}` plays it; "
        f"in a browser: {url}/console#/play/{quote(env_id, safe='')}",
        flush=True,
    )


def _ttl_s(reply: RegisterReply, asked_s: float | None) -> float:
    """Return how long a registration lives past its last heartbeat.

    When it ends is a time of the gateway's clock, of which this machine's may be hours ahead or behind.
    """
    return reply.ttl_s or asked_s or _USUAL_TTL_S


def _keep(
    client: httpx.Client,
    reply: RegisterReply,
    register: Callable[[], RegisterReply],
    asked_s: float | None = None,
) -> None:
    """Send heartbeats until interrupted, then unregister; register again if the gateway has forgotten."""
    trouble = ""
    try:
        # A reader of the id may interrupt this command at once.
        print(reply.registration_id, flush=True)
        _print_offer(reply, client, "until this command is stopped")
        while True:
            pause_s = _AGAIN_S if trouble else _ttl_s(reply, asked_s) / 3
            time.sleep(min(max(1.0, pause_s), _LONGEST_PAUSE_S))
            try:
                reply = _beat(client, reply, register)
            except (ConnectionError, DecodeError, ProblemError) as error:
                if isinstance(error, ProblemError) and error.code not in _MAY_PASS:
                    raise
                if str(error) != trouble:
                    print(f"{error}; trying on", file=sys.stderr, flush=True)
                trouble = str(error)
            else:
                trouble = ""
    except KeyboardInterrupt:
        try:
            _call(client, "DELETE", f"/v1/registrations/{reply.registration_id}")
        except ProblemError as problem:
            if problem.code != "unknown_registration":  # another has ended it, which is as good
                raise
        print(f"{reply.env_id} takes no new sessions any more")


def _beat(client: httpx.Client, reply: RegisterReply, register: Callable[[], RegisterReply]) -> RegisterReply:
    """Send a heartbeat, or register again; return the present registration."""
    try:
        beat = _call(client, "POST", f"/v1/registrations/{reply.registration_id}/heartbeat", {})
    except ProblemError as problem:
        if problem.code != "unknown_registration":
            raise
        again = register()
        print(again.registration_id, flush=True)
        return again
    with reading("heartbeat"):
        heard = HeartbeatReply.model_validate(beat)
    return reply.model_copy(update={"ttl_s": heard.ttl_s or reply.ttl_s})


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("env_id", help="What the environment is called.")
    parser.add_argument("server", metavar="URL", help="Base URL of the server that has it.")
    parser.add_argument(
        "--protocol",
        choices=UPSTREAM_PROTOCOLS,
        metavar="PROTOCOL",
        default=ROLLGYM.name,
        # What is installed is looked through for this help, and where another name than ours is given.
        help="What that server speaks: %(choices)s (default %(default)s).",
    )
    parser.add_argument("--upstream-env-id", help="What the environment is called there, if otherwise.")
    parser.add_argument(
        "--action-field",
        help="openenv: the field of an action that a text is for; . for the JSON of the whole action.",
    )
    parser.add_argument(
        "--observation-field",
        help="openenv: the field of an observation that is the text; . for the JSON of the whole.",
    )
    parser.add_argument("--server-token", help="Bearer token for that server.")


def _add_gateway(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gateway", required=True, metavar="URL", help="The gateway.")
    add_token_argument(parser)


def _client(url: str, token: str | None) -> httpx.Client:
    try:
        server_parts(url, ("http", "https"))
        return httpx.Client(base_url=url, headers=bearer_headers(token), timeout=_TIMEOUT_S, trust_env=False)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except httpx.InvalidURL as error:
        raise UsageError(f"{url!r} is not the address of a server: {error}") from error


def _register(client: httpx.Client, options: argparse.Namespace, more: Mapping[str, Any]) -> RegisterReply:
    body = {
        "env_id": options.env_id,
        "url": options.server,
        "protocol": options.protocol,
        "upstream_env_id": options.upstream_env_id,
        "token": options.server_token,
        "action_field": options.action_field,
        "observation_field": options.observation_field,
        **more,
    }
    answer = _call(client, "POST", "/v1/envs", body)
    with reading("register"):
        return RegisterReply.model_validate(answer)


def _call(client: httpx.Client, method: str, path: str, body: Any = None) -> Any:
    """Call a gateway.

    Raises:
        ProblemError: The gateway refuses.
        ConnectionError: It cannot be reached, or is not a gateway.
    """
    try:
        answer = client.request(method, path, json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConnectionError(f"{client.base_url} cannot be reached: {error}") from error
    if answer.status_code == 204:
        return None
    try:
        reply = loads(answer.content, binary=False)
    except DecodeError as error:
        raise ConnectionError(f"{client.base_url} is no environment server") from error
    if answer.is_success:
        return reply
    raise ProblemError.from_problem(reply if isinstance(reply, dict) else {"detail": str(reply)})
