"""What routing and FastAPI cost a call over HTTP: CPU time of a step that is called bare, by a plain route, by FastAPI.

All three run the same function in this process, without a network. Bare is a dictionary of paths; a plain route is what
the server has for its hot calls, in a Starlette router; the third is the same function as a route that FastAPI runs.
They take turns, in an order that turns with the rounds. The smallest figure is what the code costs, the median what it
costs here and now.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import processes
from fastapi import FastAPI
from rounds import about, median, parser, progress, record, table, write
from starlette.routing import Router

from rollgym.clients.protocol.frames import dumps, loads
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.tokens import ANYONE, Tokens
from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.common.io_process import ProcessRank
from rollgym.env_server.common.negotiation import read_headers
from rollgym.env_server.common.settings_loading import check_settings
from rollgym.env_server.http.call_routes import HEADERS, SERVICES, CallRoute, PlainRoute
from rollgym.env_server.http.calls import HOT_CALLS
from rollgym.env_server.operations.services import Services

Application = Callable[[dict[str, Any], Any, Any], Awaitable[None]]
CALLS_AT_ONCE = 200
WAYS = ("bare", "plain route", "FastAPI route")


def bare(path: str, route: PlainRoute) -> Application:
    """The route's own function behind a dictionary of paths."""
    known = {path: (route, route.path_regex.match(path).groupdict())}  # type: ignore[union-attr]

    async def serve(scope: dict[str, Any], receive: Any, send: Any) -> None:
        scope["route"], scope["path_params"] = known[scope["path"]]
        await scope["route"].handle(scope, receive, send)

    return serve


def by_fastapi(route: PlainRoute) -> Application:
    """The same function as a route that FastAPI runs."""
    described = {"methods": ["POST"], "name": route.name, "dependencies": route.dependencies}
    return FastAPI(routes=[CallRoute(route.path, route.endpoint, **described)])


async def call(application: Application, services: Services, path: str, body: bytes) -> dict[str, Any]:
    """One POST; the scope is made as the server makes it."""
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"127.0.0.1:8000"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
    }
    scope[SERVICES], scope[HEADERS] = services, read_headers(scope)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await application(scope, receive, send)
    assert sent[0]["status"] == 200, sent
    reply: dict[str, Any] = loads(sent[1]["body"], binary=False)
    return reply


async def cpu_us(application: Application, services: Services, session_id: str, seconds: float) -> float:
    """CPU time of a step, in microseconds, over this much CPU time or a little more."""
    path, steps = f"/v1/sessions/{session_id}/step", 0
    body = dumps({"action": "<answer>Left</answer>", "autoreset": True}, binary=False)
    began = time.process_time()
    while time.process_time() - began < seconds:
        for _ in range(CALLS_AT_ONCE):
            await call(application, services, path, body)
        steps += CALLS_AT_ONCE
    return 1e6 * (time.process_time() - began) / steps


async def main() -> None:
    options = parser(__doc__, rounds=30, seconds=0.3).parse_args()
    result = record("benchmarks/serving/http_routes.py", options, {}, {})
    settings = check_settings({"workers": 1})
    services = Services(settings, ProcessRank(), Tokens.load(None), Catalog.load(settings))
    await services.start()
    route = next(each for each in HOT_CALLS.routes if isinstance(each, PlainRoute) and each.name == "step")
    routers = Router(HOT_CALLS.routes, redirect_slashes=False)
    reset = "/v1/sessions/{}/reset"
    rows: list[dict[str, Any]] = []
    async with asyncio.timeout(600):
        for number in range(options.rounds):
            for position in range(len(WAYS)):
                who = WAYS[(number + position) % len(WAYS)]
                made = await _made(services)
                await call(routers, services, reset.format(made), b'{"seed": 1}')
                path = f"/v1/sessions/{made}/step"
                application = {
                    "bare": bare(path, route),
                    "plain route": routers,
                    "FastAPI route": by_fastapi(route),
                }[who]
                cost = await cpu_us(application, services, made, options.seconds)
                rows.append({"who": who, "cpu_us": cost, "load_average": processes.load_average()})
                progress(f"round {number + 1}: {who}: {cost:.1f} us")
    result["rounds_measured"] = rows
    costs = {who: sorted(row["cpu_us"] for row in rows if row["who"] == who) for who in WAYS}
    result["calls"] = [
        {
            "who": who,
            "cpu_us_per_step": median(each),
            "smallest_cpu_us_per_step": each[0],
            "smallest_over_bare": each[0] / costs["bare"][0] - 1,
        }
        for who, each in costs.items()
    ]
    write(result, options.out)
    shown = [
        (
            each["who"],
            f"{each['cpu_us_per_step']:.1f}",
            f"{each['smallest_cpu_us_per_step']:.1f}",
            f"{each['smallest_over_bare']:+.0%}",
        )
        for each in result["calls"]
    ]
    heads = ("a step by", "CPU µs, median", "smallest", "over bare")
    print(about(result, rows), table(heads, shown), sep="\n\n")
    await services.drain()
    await services.stop()


async def _made(services: Services) -> str:
    reply = services.operations.call(Context(ANYONE, binary=False), "make", {"env_id": "FrozenLake-v0"})
    made = reply if isinstance(reply, dict) else await reply
    return str(made["session_id"])


if __name__ == "__main__":
    asyncio.run(main())
