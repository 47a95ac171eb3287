"""The Docker Engine: whether it is reachable and has the needed features, and how its containers are closed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import docker
import requests
from docker.types import LogConfig

from rollgym.sandbox.containers.inside.files import WORKING_DIRECTORY
from rollgym.sandbox.containers.seccomp import profile_text
from rollgym.sandbox.core.base import SandboxUnavailableError
from rollgym.sandbox.core.limits import Limits

LABEL = "rollgym.sandbox"
_NOBODY = 65534
# The needs of the process in the container itself, beside its programs.
_OWN_MEMORY_MB = 32
_OWN_PIDS = 1
_SHARED_MEMORY_MB = 16
_SPOOLED_INODES = 16
# Files by which a kernel describes its machine; Docker masks some of them by itself. The container's control groups
# stay visible: they report exhausted memory.
_COVERED = ("/sys/block", "/sys/bus", "/sys/class", "/sys/dev", "/sys/devices", "/sys/kernel", "/sys/module")


@dataclass(frozen=True, slots=True)
class ContainerShape:
    """The limits that a container is made with; the others belong to a run.

    Attributes:
        memory_mb: MiB of all processes of a program.
        pids: Processes and threads of a program.
        disk_mb: MiB of files in the working directory, and as many in `/tmp`.
        inodes: Files in each of the two.
    """

    memory_mb: int
    pids: int
    disk_mb: int
    inodes: int

    @classmethod
    def of(cls, limits: Limits) -> "ContainerShape":
        """The shape that fits the limits."""
        return cls(limits.memory_mb, limits.pids, limits.disk_mb, limits.inodes)


def container_options(
    image: str, program: str, shape: ContainerShape, *, cpus: float, read_only: Sequence[str] = ()
) -> dict[str, Any]:
    """Return how a container is made, in the words of the Docker SDK.

    Args:
        image: With Python 3 in it.
        program: Source text of the first process.
        shape: How much it may use.
        cpus: How many processors, on average.
        read_only: Files and directories of the engine's machine that are shown under their own names.
    """
    memory = f"{shape.memory_mb + _OWN_MEMORY_MB}m"
    return {
        "image": image,
        "entrypoint": ["python3", "-I", "-S", "-c", program],
        "command": [],
        "environment": {},
        "labels": {LABEL: "1"},
        "stdin_open": True,
        "user": f"{_NOBODY}:{_NOBODY}",
        "hostname": "sandbox",
        "working_dir": "/",
        "network_mode": "none",
        "ipc_mode": "none",
        "read_only": True,
        "tmpfs": _file_systems(shape),
        "volumes": {path: {"bind": path, "mode": "ro"} for path in read_only},
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true", f"seccomp={profile_text(namespaces=False)}"],
        "mem_limit": memory,
        "memswap_limit": memory,
        "pids_limit": shape.pids + _OWN_PIDS,
        "nano_cpus": int(cpus * 1e9),
        # A flood would be on the host's disk otherwise.
        "log_config": LogConfig(type=LogConfig.types.NONE),
        # The process in it is one that reaps; another one before it could be killed.
        "init": False,
    }


def _file_systems(shape: ContainerShape) -> Mapping[str, str]:
    own = f"uid={_NOBODY},gid={_NOBODY},mode=0700,nosuid,nodev"
    inodes = shape.inodes + _SPOOLED_INODES
    return {
        **dict.fromkeys(_COVERED, "size=4k,nr_inodes=2,ro"),
        WORKING_DIRECTORY: f"{own},exec,size={shape.disk_mb}m,nr_inodes={inodes}",
        "/tmp": f"{own},exec,size={shape.disk_mb}m,nr_inodes={inodes}",
        "/dev/shm": f"{own},noexec,size={_SHARED_MEMORY_MB}m,nr_inodes=256",
    }


def run_limits(limits: Limits) -> list[tuple[str, int, int]]:
    """Limits of each process of a run: names of Python's `resource`, each with its soft and its hard limit."""
    cpu_seconds = max(1, round(limits.cpu_seconds or limits.wall_seconds))
    size = limits.disk_mb * 2**20
    return [
        ("RLIMIT_CPU", cpu_seconds, cpu_seconds + 1),
        ("RLIMIT_FSIZE", size, size),
        ("RLIMIT_NOFILE", limits.open_files, limits.open_files),
        ("RLIMIT_CORE", 0, 0),
        ("RLIMIT_MEMLOCK", 0, 0),
        ("RLIMIT_MSGQUEUE", 0, 0),
    ]


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
