"""A running fleet, as an operator handles it: with `docker` and one of the two Compose commands."""

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable
from typing import Any

import httpx


class Fleet:
    """The Compose project of `COMPOSE_PROJECT_NAME`, which `.ci/compose` has started."""

    def __init__(self) -> None:
        self.url = f"http://127.0.0.1:{os.environ['GATEWAY_PORT']}"
        self.token = os.environ["ROLLGYM_TOKEN"]
        self._compose = shlex.split(os.environ["COMPOSE"])

    def compose(self, *arguments: str) -> str:
        """Run a command of Compose."""
        return _run(*self._compose, "--profile", "monitoring", "--profile", "example", *arguments)

    def scale(self, nodes: int) -> None:
        """Start as many nodes as are missing."""
        self.compose("up", "--detach", "--no-recreate", "--scale", f"environments={nodes}", "environments")

    def containers(self, service: str) -> list[str]:
        """The ids of a service's running containers."""
        return _run(
            *("docker", "ps", "--quiet", "--no-trunc"),
            *("--filter", f"label=com.docker.compose.project={os.environ['COMPOSE_PROJECT_NAME']}"),
            *("--filter", f"label=com.docker.compose.service={service}"),
        ).split()

    def inspect(self, container: str) -> dict[str, Any]:
        """What Docker says of a container."""
        return json.loads(_run("docker", "inspect", container))[0]

    def networks(self, container: str) -> list[str]:
        """The networks that a container is in, by their names in compose.yaml."""
        prefix = os.environ["COMPOSE_PROJECT_NAME"] + "_"
        return [name.removeprefix(prefix) for name in self.inspect(container)["NetworkSettings"]["Networks"]]

    def inside(self, container: str, *command: str) -> str:
        """What a command prints in a container."""
        return _run("docker", "exec", container, *command)

    def signal(self, container: str, name: str) -> None:
        """Send a signal to the first process of a container."""
        _run("docker", "kill", "--signal", name, container)

    def remove(self, *containers: str) -> None:
        """Tell containers to stop, wait until they have, and remove them."""
        _run("docker", "stop", "--time", "40", *containers)
        _run("docker", "rm", *containers)

    def get(self, path: str, token: str | None) -> httpx.Response:
        """Ask the gateway."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.get(self.url + path, headers=headers, timeout=10)

    def prometheus(self, path: str, **query: str) -> Any:
        """Ask Prometheus."""
        url = f"http://127.0.0.1:{os.environ['PROMETHEUS_PORT']}{path}"
        answer = httpx.get(url, params=query, timeout=10).json()
        assert answer["status"] == "success", (query, answer)
        return answer["data"]

    def replicas(self) -> dict[str, int]:
        """How many servers have each environment."""
        listed = self.get("/v1/envs", self.token).json()["envs"]
        return {entry["env_id"]: entry["replicas"] for entry in listed}


def eventually(holds: Callable[[], bool], patience_s: float = 60.0) -> bool:
    """Whether something becomes true; other containers bring it about, and none of them tells us."""
    give_up_at = time.monotonic() + patience_s
    while time.monotonic() < give_up_at:
        if holds():
            return True
        time.sleep(0.2)
    return False


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, f"{shlex.join(command)}: {result.stdout}{result.stderr}"
    return result.stdout
