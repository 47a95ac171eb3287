"""How many programs a second: fresh sandboxes and warm ones, beside plain processes and bubblewrap alone.

python benchmarks/sandbox/throughput.py --output benchmarks/results/sandbox.json
python benchmarks/sandbox/throughput.py --sandbox docker:IMAGE --output sandbox_docker.json
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rollgym.clients.measuring.revision import revision
from rollgym.sandbox.core.base import Outcome, Program, SandboxUnavailableError
from rollgym.sandbox.core.languages import host_toolchain
from rollgym.sandbox.selection import open_sandbox
from rollgym.sandbox.warm.pool import WarmPool

_PYTHON, _BASH = Program("python", "print(1)"), Program("bash", "echo 1")
_BWRAP = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib",
          "--symlink", "usr/lib64", "/lib64", "--symlink", "usr/bin", "/bin", "--proc", "/proc",
          "--dev", "/dev"]  # fmt: skip


def command(*arguments: str) -> Callable[[], bytes]:
    """Return a run of a plain command."""
    return lambda: subprocess.run(arguments, capture_output=True, check=True, stdin=subprocess.DEVNULL).stdout


@contextmanager
def ways(names: Sequence[str]) -> Iterator[dict[str, Callable[[], bytes]]]:
    """What is measured: each gives the program's output."""
    python = host_toolchain().python
    found: dict[str, Callable[[], bytes]] = {
        "plain process, bash": command("/bin/bash", "-c", "echo 1"),
        "plain process, python": command(python, "-c", "print(1)"),
    }
    if shutil.which("bwrap"):
        found["bwrap alone, bash"] = command(*_BWRAP, "/bin/bash", "-c", "echo 1")
        found["bwrap alone, python"] = command(*_BWRAP, python, "-c", "print(1)")
    opened: list[Any] = []

    def run_in(sandbox: Any, program: Program) -> Callable[[], bytes]:
        def run() -> bytes:
            result = sandbox.run(program)
            if result.outcome is not Outcome.OK:
                raise RuntimeError(result.detail)
            output: bytes = result.stdout
            return output

        return run

    for name in names:
        try:
            sandbox = open_sandbox(name)
        except SandboxUnavailableError as error:
            print(error)
            continue
        opened.append(sandbox)
        found[f"{name}, bash"] = run_in(sandbox, _BASH)
        found[f"{name}, python"] = run_in(sandbox, _PYTHON)
    pool = WarmPool(open_sandbox(), workers=os.cpu_count() or 1)
    opened.append(pool)
    found["warm, python"] = run_in(pool, _PYTHON)
    yield found
    for one in opened:
        one.close()


def own_cpu_group() -> Path | None:
    """Make a group that counts the CPU time of this process and of all that it starts; None where that is refused."""
    group = Path(f"/sys/fs/cgroup/cpuacct/rollgym-benchmark-{os.getpid()}")
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        return None
    return group / "cpuacct.usage"


def measure(run: Callable[[], bytes], runs: int, at_once: int, counter: Path | None) -> dict[str, Any]:
    """Time runs one after another, and several at a time; a busy machine changes their CPU time least."""
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda _: run(), range(at_once)))
    seconds = []
    cpu = int(counter.read_text()) if counter else 0
    for _ in range(runs):
        began = time.perf_counter()
        if run() != b"1\n":
            raise RuntimeError("the program did not say what it should")
        seconds.append(time.perf_counter() - began)
    cpu = int(counter.read_text()) - cpu if counter else 0
    with ThreadPoolExecutor(at_once) as pool:
        began = time.perf_counter()
        list(pool.map(lambda _: run(), range(2 * runs)))
        rate = 2 * runs / (time.perf_counter() - began)
    return {
        "milliseconds_median": round(1000 * statistics.median(seconds), 1),
        "milliseconds_least": round(1000 * min(seconds), 1),
        "cpu_milliseconds": round(cpu / runs / 1e6, 1) if counter else None,
        "runs_per_second": round(rate, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=40, help="Of each kind, one after another (default 40).")
    parser.add_argument("--at-once", type=int, default=4, help="Runs at a time for the rate (default 4).")
    parser.add_argument(
        "--sandbox",
        action="append",
        metavar="NAME",
        help="Which ones (repeatable; default namespaces, bubblewrap, landlock).",
    )
    parser.add_argument("--output", type=Path, help="A JSON file for the results.")
    options = parser.parse_args()
    rows, counter = [], own_cpu_group()
    with ways(options.sandbox or ("namespaces", "bubblewrap", "landlock")) as found:
        for name, run in found.items():
            before = os.getloadavg()[0]
            rows.append(
                {
                    "what": name,
                    **measure(run, options.runs, options.at_once, counter),
                    "load_before": round(before, 1),
                }
            )
            print(rows[-1], flush=True)
    commit = revision()
    report = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release().split('-')[0]}",
        "root": os.geteuid() == 0,
        "runs": options.runs,
        "at_once": options.at_once,
        "most_memory_of_the_caller_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "rows": rows,
    }
    if counter is not None:
        (counter.parents[1] / "cgroup.procs").write_text(str(os.getpid()))
        with suppress(OSError):  # The kernel may still be busy with the last processes in it.
            counter.parent.rmdir()
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
