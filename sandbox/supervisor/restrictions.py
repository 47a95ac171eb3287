"""Restrictions that a program's own process takes on, just before it becomes the program."""

import fcntl
import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Limit = tuple[int, int]

_OUT_OF_THE_WAY = 64


def resource_limits(
    *,
    memory_bytes: int | None,
    cpu_seconds: float,
    disk_bytes: int,
    open_files: int,
    tasks: int | None,
) -> dict[int, Limit]:
    """Return the limits of a process, soft and hard; None leaves one as it is."""
    seconds = max(1, int(-(-cpu_seconds // 1)))
    limits = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_FSIZE: (disk_bytes, disk_bytes),
        resource.RLIMIT_NOFILE: (open_files, open_files),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (1 << 16, 1 << 16),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_NICE: (0, 0),
        resource.RLIMIT_RTPRIO: (0, 0),
        resource.RLIMIT_SIGPENDING: (256, 256),
    }
    if memory_bytes is not None:
        limits[resource.RLIMIT_AS] = (memory_bytes, memory_bytes)
    if tasks is not None:
        limits[resource.RLIMIT_NPROC] = (tasks, tasks)
    return limits


def apply_limits(limits: Mapping[int, Limit]) -> None:
    """Set limits of the calling process; one that is lower already stays."""
    for name, (soft, hard) in limits.items():
        _, ceiling = resource.getrlimit(name)
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(name, (soft, hard))


def spawn(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    streams: Sequence[int],
    confine: Callable[[], Any],
) -> int:
    """Fork, confine the child, and start a program in it.

    Args:
        arguments: The command line; the first is a path.
        environment: The only environment variables that it gets.
        directory: Its working directory.
        streams: Descriptors for its input, output and errors.
        confine: Called in the child, last of all.

    Returns:
        The child's id.

    Raises:
        OSError: If the program cannot be started, or could not be confined; the program has not run in that case.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _become(arguments, environment, directory, streams, confine, writing)
    os.close(writing)
    with open(reading, "rb") as report:
        text = report.read()
    if text:
        os.waitpid(child, 0)
        code, _, words = text.decode(errors="replace").partition(" ")
        raise OSError(int(code), words)
    return child


def _become(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    streams: Sequence[int],
    confine: Callable[[], Any],
    report: int,
) -> None:
    """Turn the forked child into the program; ends the process in any case."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # The report and the streams may lie anywhere: first out of the way of the numbers they are to have.
        lifted = [fcntl.fcntl(stream, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY) for stream in streams]
        kept = os.dup2(report, 3, inheritable=False)
        for index, stream in enumerate(lifted):
            os.dup2(stream, index)
        os.umask(0o022)
        os.chdir(directory)
        confine()
        os.closerange(kept + 1, 1 << 16)
        os.execve(arguments[0], list(arguments), dict(environment))
    except (OSError, ValueError) as error:
        code = error.errno or 0 if isinstance(error, OSError) else 0
        os.write(3, f"{code} {arguments[0]}: {error}".encode())
    finally:
        os._exit(127)
