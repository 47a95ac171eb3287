"""What every test can count on."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

# The models of tests are tiny: threads that wait for each other on a busy machine take more than they give. Torch reads
# this once, and conftest.py files below import it before anything is configured.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

from tests.support.skips import SkipCheck, read_entries

# What examples take on a busy machine says nothing of what is tested.
settings.register_profile(
    "busy", parent=settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy")

# Files with tests of more than ten seconds, which would stretch the end; those with the longest ones first.
LONGEST = (
    "tests/trainer/cluster/test_ray_runs.py",
    "tests/env_server/http/test_openapi_conformance.py",
    "tests/trainer/test_runs.py",
    "tests/trainer/test_kills.py",
    "tests/envs/test_long_replies.py",
    "tests/benchmarks/test_soak.py",
    "tests/trainer/models/test_memory_plan.py",
    "tests/trainer/cluster/test_local_runs.py",
    "tests/examples/test_one_gpu.py",
    "tests/clients/audit/test_own_environments.py",
)

ROOT = Path(__file__).absolute().parents[1]


class _Refusal(Loader):
    def exec_module(self, module: ModuleType) -> None:
        raise ImportError(f"import rollgym.{module.__name__}: no module of ours has a second name")


class _OneName(MetaPathFinder):
    """Refuses `import envs` and the like, which finds our folders where a checkout is on the path."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or not (ROOT / "rollgym" / name).is_symlink():
            return None
        spec = PathFinder.find_spec(name)
        if spec is not None and spec.origin is not None and Path(spec.origin).parent == ROOT / name:
            spec.loader = _Refusal()
            return spec
        return None


def pytest_configure(config: pytest.Config) -> None:
    """Import nothing by two names; hold skips in CI against their list; let Ctrl-C be Ctrl-C.

    A shell starts what runs in its background with Ctrl-C ignored, and so would we start all.
    """
    sys.meta_path.insert(0, _OneName())
    if os.environ.get("CI") and not hasattr(config, "workerinput"):
        step = os.environ.get("ROLLGYM_CI_STEP", "")
        config.pluginmanager.register(SkipCheck(read_entries(), step))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # The programs that tests start would compile every module anew, hundreds of times.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Ray lets its workers stand back for everybody else, which here are the other tests: they would time out.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # What the tests' modules import stays, and is much: no collection looks through it, not even the last one.
    gc.disable()
    atexit.register(gc.freeze)


def pytest_collection_finish() -> None:
    """Collect garbage from now on, among what comes: to look through what is there takes half a second a worker."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest: one worker is busy with it while the others take over all else that it has."""
    order = {path: place for place, path in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


def pytest_xdist_auto_num_workers() -> int:
    """Three workers for two cores, and 3 GiB for each: with four, all of them take longer, and so does the whole."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(3 * (os.cpu_count() or 1) // 2, int(memory_gib // 3)))
