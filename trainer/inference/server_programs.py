"""Programs of inference servers: whether they are installed, their ports, and their command lines."""

import importlib.util
import shutil
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rollgym.extras import install_line
from rollgym.trainer.config.inference import InferenceSettings, LaunchSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.launch import ServerProcess
from rollgym.trainer.inference.server_program import ServedModel, server_program


def require_program(inference: InferenceSettings, launch: LaunchSettings) -> None:
    """Look whether the servers' program is there.

    Raises:
        ConfigError: If it is not; the message says how to get it.
    """
    if launch.command:
        if shutil.which(launch.command[0]) is None:
            raise ConfigError(f"inference.launch.command: there is no program {launch.command[0]}")
    elif importlib.util.find_spec(inference.kind) is None:
        raise ConfigError(
            f"inference.launch: {inference.kind} is not installed beside the trainer: "
            f"{install_line(inference.kind)}, name the program of another environment by inference.launch.command, "
            "or name servers that run by inference.urls"
        )


def choose_ports(launch: LaunchSettings) -> list[int]:
    """Return the servers' ports: those that the settings name, or free ones.

    Raises:
        ConfigError: If one that they name is taken.
    """
    wanted = [0 if launch.port is None else launch.port + number for number in range(launch.count)]
    # All are held until the last is chosen: no two are one.
    with ExitStack() as held:
        return [_bound(held, launch.host, port) for port in wanted]


def _bound(held: ExitStack, host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    place = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"inference.launch: cannot listen on {host}:{port}: {error.strerror}; leave inference.launch.port out, and "
            "free ones are taken"
        ) from error
    number: int = place.getsockname()[1]
    return number


def server_processes(
    inference: InferenceSettings, launch: LaunchSettings, model: ServedModel, ports: Sequence[int], logs: Path
) -> list[ServerProcess]:
    """Return the servers that settings ask for. No I/O.

    Args:
        inference: Which servers, and what is asked of them.
        launch: How they are started.
        model: What they serve.
        ports: One for each.
        logs: Folder of what they say.

    Raises:
        ConfigError: If a server of this kind takes no adapters of such a rank.
    """
    program = server_program(inference.kind)
    processes = []
    for number, port in enumerate(ports):
        words, variables = program.command(inference, launch, model, port)
        variables |= launch.environment
        if launch.devices:
            variables[launch.devices_variable] = launch.devices[number]
        log = logs / f"{inference.kind}-{number}.log"
        command = (*words, *launch.arguments)
        processes.append(ServerProcess(command, _url(launch.host, port), log, variables))
    return processes


def _url(host: str, port: int) -> str:
    """Where a server that listens on `host` is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
