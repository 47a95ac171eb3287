"""Gateways that would pass sessions on to each other for ever are refused."""

from collections.abc import Iterator

import httpx
import pytest

from tests.support.client_server import ServerProcess

QUIET = ("--log-level", "error")
LAKE = ("--no-builtin", "--env", "Lake=rollgym.envs.games.frozen_lake:FrozenLakeEnv")
GATEWAY = ("--gateway", "--allow-network", "loopback", *QUIET)


@pytest.fixture(scope="module")
def ring() -> Iterator[list[ServerProcess]]:
    """Three gateways, the first of which has a node."""
    with (
        ServerProcess(GATEWAY) as one,
        ServerProcess(GATEWAY) as two,
        ServerProcess(GATEWAY) as three,
        ServerProcess((*LAKE, *QUIET)) as node,
    ):
        assert register(one, node).status_code == 201
        yield [one, two, three]


def register(gateway: ServerProcess, server: ServerProcess, env_id: str = "Lake") -> httpx.Response:
    body = {
        "env_id": env_id,
        "upstream_env_id": "Lake",
        "url": server.url,
        "protocol": "rollgym",
        "ttl_s": 600,
    }
    return httpx.post(f"{gateway.url}/v1/envs", json=body, timeout=60)


def refusal(answer: httpx.Response) -> str:
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (422, "invalid_request"), problem
    assert [error["field"] for error in problem["errors"]] == ["url"]
    return str(problem["detail"])


def test_a_gateway_is_not_registered_with_itself(ring: list[ServerProcess]) -> None:
    assert "is this gateway itself" in refusal(register(ring[0], ring[0]))
    assert "is this gateway itself" in refusal(register(ring[0], ring[0], "Other"))


def test_a_row_of_gateways_is_not_closed_to_a_ring(ring: list[ServerProcess]) -> None:
    one, two, three = ring
    assert register(two, one).status_code == 201
    assert "has this one behind it" in refusal(register(one, two))
    assert "has this one behind it" in refusal(register(one, two, "Other"))
    assert register(three, two).status_code == 201
    assert "has this one behind it" in refusal(register(one, three, "Other"))
    assert "has this one behind it" in refusal(register(two, three, "Other"))
    # What is no circle goes on: two ways to one gateway.
    assert register(three, one, "Direct").status_code == 201
    with httpx.Client(base_url=one.url) as http:
        assert [env["env_id"] for env in http.get("/v1/envs").json()["envs"]] == ["Lake"]
        assert http.post("/v1/sessions", json={"env_id": "Lake"}).status_code == 201


def test_only_gateways_are_told_of_gateways(ring: list[ServerProcess]) -> None:
    assert "gateways" not in httpx.get(f"{ring[0].url}/v1/info").json()
