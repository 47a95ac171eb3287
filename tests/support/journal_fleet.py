"""Gateways that share a journal, before the same nodes."""

import asyncio
from typing import NamedTuple

import httpx

from rollgym.clients.protocol.errors import ProblemError
from tests.support.client_server import ServerProcess
from tests.support.gateway_players import Player
from tests.support.redis_server import RedisServer

QUIET = ("--log-level", "error")
GATEWAY = ("--gateway", "--allow-network", "loopback", *QUIET)
WALKS = ("--no-builtin", "--env", "Walk-v0=tests.support.client_envs:Walk", "--isolation", "Walk-v0=inline")


class Fleet(NamedTuple):
    """Gateways that share a journal, and nodes that are registered with all of them."""

    journal: RedisServer
    gateways: list[ServerProcess]
    nodes: list[ServerProcess]


async def whole_at(gateways: list[ServerProcess], nodes: int) -> None:
    """Wait until all nodes are registered with all gateways."""
    async with httpx.AsyncClient() as http, asyncio.timeout(60):
        for gateway in gateways:
            while True:
                found = (await http.get(f"{gateway.url}/v1/envs")).json().get("envs", [])
                if [env["replicas"] for env in found] == [nodes]:
                    break
                await asyncio.sleep(0.05)


async def patiently(player: Player, action: str, url: str | None = None) -> None:
    """A step as a client takes it, which asks again when it is told to."""
    async with asyncio.timeout(30):
        while True:
            try:
                await player.step(action, url=url)
            except ProblemError as problem:
                if problem.code != "draining":
                    raise
                await asyncio.sleep(0.1)
            else:
                return
