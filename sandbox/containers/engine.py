"""The Docker Engine: whether it is reachable, and has the needed features."""

import docker
import requests

from rollgym.sandbox.containers.flags import LABEL
from rollgym.sandbox.core.base import SandboxUnavailableError

ENGINE_ERRORS = (docker.errors.DockerException, requests.exceptions.RequestException, OSError)
"""Errors of the Docker SDK when the engine cannot be reached or refuses."""

# The features of control groups that it must report, and the limit that fails without each.
_NEEDED = {"MemoryLimit": "memory", "PidsLimit": "processes", "CpuCfsQuota": "processors"}


def connect(image: str) -> docker.DockerClient:
    """Find the engine that the environment names (`DOCKER_HOST`), or this machine's.

    Args:
        image: The image that it must have.

    Raises:
        SandboxUnavailableError: If none is found, or it lacks a needed feature.
    """
    try:
        engine = docker.from_env()
        known = engine.info()
    except ENGINE_ERRORS as error:
        raise SandboxUnavailableError(
            f"no Docker Engine answers ({error}): start one, or name it in DOCKER_HOST; whoever runs this needs the "
            "right to speak to it"
        ) from error
    try:
        _check(known)
        engine.images.get(image)
        # The containers of a server that was killed end by themselves, and are left.
        engine.containers.prune(filters={"label": LABEL})
    except docker.errors.ImageNotFound as error:
        engine.close()
        raise SandboxUnavailableError(
            f"the Docker Engine has no image {image}: `docker pull {image}`, or build one from "
            "deploy/sandbox/Dockerfile and name it"
        ) from error
    except (*ENGINE_ERRORS, SandboxUnavailableError):
        engine.close()
        raise
    return engine


def _check(known: dict[str, object]) -> None:
    for name, what in _NEEDED.items():
        if not known.get(name):
            raise SandboxUnavailableError(
                f"this Docker Engine does not limit {what} ({name}): give it the kernel's control groups (a rootless "
                "engine needs cgroup v2)"
            )
    options = known.get("SecurityOptions")
    if not any("seccomp" in str(option) for option in (options if isinstance(options, list) else ())):
        raise SandboxUnavailableError("this Docker Engine filters no system calls: its build lacks seccomp")
