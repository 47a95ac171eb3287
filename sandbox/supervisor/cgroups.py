"""Control groups, versions 1 and 2: the kernel's own sum over the processes of a run, if they are writable."""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "rollgym-"
# A group is empty for a moment before its first process comes, and after its last has gone.
_LEFT_BEHIND_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Usage:
    """The counters of a group.

    Attributes:
        memory_exhausted: Whether a process was killed because memory was exhausted.
        pids_refused: Whether a new process was refused because of the limit.
        peak_bytes: Most memory at one time; 0 if unknown.
    """

    memory_exhausted: bool
    pids_refused: bool
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Parents:
    """The directories in which groups of runs can be made.

    Attributes:
        version: The version of the interface, 1 or 2.
        memory: The directory of the memory controller.
        pids: The directory of the pids controller; the same one in version 2.
    """

    version: int
    memory: str
    pids: str


def find_parents() -> Parents | None:
    """Return the parent directories for groups below this process's own, or None if that is not allowed.

    Only a trial proves it: a group is made and removed.
    """
    for parents in candidates(_read("/proc/self/cgroup"), _read("/proc/self/mountinfo")):
        if parents.version == 2 and not _enable_controllers(parents.memory):
            continue
        group = ControlGroup(parents, unique_name("try"))
        try:
            group.create()
            group.limit_memory(64)
        except OSError:
            continue
        finally:
            group.remove(patience_seconds=0)
        _remove_left_behind(parents)
        return parents
    return None


def unique_name(kind: str) -> str:
    """Return a name for a group.

    A process id alone is not unique: an earlier process had it, or a process in another namespace has it.
    """
    return f"{_PREFIX}{kind}-{os.getpid()}-{os.urandom(4).hex()}"


def _remove_left_behind(parents: Parents) -> None:
    """Remove groups of processes that were killed before they could; the kernel keeps those that are not empty."""
    for parent in {parents.memory, parents.pids}:
        for group in Path(parent).glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                if group.stat().st_mtime < time.time() - _LEFT_BEHIND_SECONDS:
                    group.rmdir()


def candidates(own_groups: str, mounts: str) -> list[Parents]:
    """Return the directories in which groups might be made.

    Args:
        own_groups: The text of `/proc/self/cgroup`.
        mounts: The text of `/proc/self/mountinfo`.
    """
    mounted = _mounted(mounts)
    own: dict[str, str] = {}
    for line in own_groups.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            own[controller] = path
    if {"memory", "pids"} <= own.keys() & mounted.keys():
        return [Parents(1, _join(mounted["memory"], own["memory"]), _join(mounted["pids"], own["pids"]))]
    if "" not in own or "" not in mounted:
        return []
    here = _join(mounted[""], own[""])
    # Processes and controlled groups exclude each other in one directory: a service with a sub-group of its own
    # (systemd's DelegateSubgroup) can make groups beside itself.
    beside = [str(Path(here).parent)] if own[""].strip("/") else []
    return [Parents(2, directory, directory) for directory in (here, *beside)]


def _mounted(mounts: str) -> dict[str, tuple[str, str]]:
    """The mount point of each controller, with the path within the hierarchy that is seen there; "" is version 2."""
    found: dict[str, tuple[str, str]] = {}
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, mount_point = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            found.setdefault("", (root, mount_point))
        elif kind == "cgroup":
            for controller in options.split(","):
                found.setdefault(controller, (root, mount_point))
    return found


def _join(mount: tuple[str, str], path: str) -> str:
    root, mount_point = mount
    inner = path[len(root) :] if root != "/" and path.startswith(root) else path
    return (mount_point + "/" + inner.strip("/")).rstrip("/")


def _enable_controllers(directory: str) -> bool:
    control = Path(directory, "cgroup.subtree_control")
    with contextlib.suppress(OSError):
        if not {"memory", "pids"} <= set(control.read_text().split()):
            control.write_text("+memory +pids")
        return {"memory", "pids"} <= set(control.read_text().split())
    return False


class ControlGroup:
    """The group of one run.

    Args:
        parents: The parent groups to create it in.
        name: Its directory.
    """

    def __init__(self, parents: Parents, name: str) -> None:
        self._version = parents.version
        self._memory = f"{parents.memory}/{name}"
        self._pids = f"{parents.pids}/{name}"

    def create(self) -> None:
        """Make it.

        Raises:
            OSError: If that is not allowed.
        """
        for directory in self._directories():
            os.mkdir(directory)

    def limit_memory(self, mebibytes: int) -> None:
        """Bound the sum of memory, swap included."""
        limit = str(mebibytes << 20)
        if self._version == 2:
            _write(f"{self._memory}/memory.max", limit)
            with contextlib.suppress(OSError):
                _write(f"{self._memory}/memory.swap.max", "0")
            return
        names = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
        names = [f"{self._memory}/{name}" for name in names if os.path.exists(f"{self._memory}/{name}")]
        try:
            for name in names:
                _write(name, limit)
        except OSError:  # The second must never be below the first: raising them goes the other way round.
            for name in reversed(names):
                _write(name, limit)

    def forget_peak(self) -> None:
        """Reset the peak of memory, if the kernel allows it."""
        if self._version == 1:
            _write(f"{self._memory}/memory.max_usage_in_bytes", "0")

    def limit_pids(self, count: int) -> None:
        """Bound the number of processes and threads."""
        _write(f"{self._pids}/pids.max", str(count))

    def add(self, pid: int) -> None:
        """Move a process into it; processes that it starts later belong to it as well."""
        for directory in self._directories():
            _write(f"{directory}/cgroup.procs", str(pid))

    def usage(self) -> Usage:
        """Return the present counters of the group."""
        if self._version == 2:
            memory_events, peak = _pairs(f"{self._memory}/memory.events"), f"{self._memory}/memory.peak"
        else:
            memory_events = _pairs(f"{self._memory}/memory.oom_control")
            peak = f"{self._memory}/memory.max_usage_in_bytes"
        return Usage(
            memory_exhausted=memory_events.get("oom_kill", 0) > 0,
            pids_refused=_pairs(f"{self._pids}/pids.events").get("max", 0) > 0,
            peak_bytes=int(_read(peak) or 0),
        )

    def remove(self, patience_seconds: float) -> None:
        """Remove it, once its last process is gone."""
        deadline = time.monotonic() + patience_seconds
        for directory in self._directories():
            while True:
                try:
                    os.rmdir(directory)
                except FileNotFoundError:
                    break
                except OSError:
                    if time.monotonic() >= deadline:
                        break
                    time.sleep(0.01)  # Version 1 sends no event when a group becomes empty.
                else:
                    break

    def _directories(self) -> list[str]:
        return [self._memory] if self._version == 2 else [self._memory, self._pids]


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _pairs(path: str) -> dict[str, int]:
    pairs = (line.split() for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
