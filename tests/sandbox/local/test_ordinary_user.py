"""The back-ends without root: where the tests are root, they become somebody else for this."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[3]
_NOBODY = 65534
_SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from rollgym.sandbox.core.base import SandboxUnavailableError
from rollgym.sandbox.core.limits import Limits
from rollgym.sandbox.core.base import Program
from rollgym.sandbox.selection import make_sandbox

SUM = '''
import os, time
for _ in range(8):
    if os.fork() == 0:
        data = bytearray(os.urandom(1 << 20)) * 128
        time.sleep(30)
        os._exit(0)
for _ in range(8): os.wait()
'''
sandbox = make_sandbox(sys.argv[2])
try:
    seen = sandbox.probe()
except SandboxUnavailableError as error:
    print(json.dumps({"unavailable": str(error)}))
    sys.exit()
many = sandbox.run(Program("python", SUM), limits=Limits(memory_mb=256, wall_seconds=20))
BOMB = "for i in $(seq 40); do sleep 9 & done; wait"
bomb = sandbox.run(Program("bash", BOMB), limits=Limits(pids=16, wall_seconds=4))
who = sandbox.run(Program("python", "import os, sys; sys.exit(os.geteuid() == 0)"))
sandbox.close()
print(json.dumps({"level": seen.level, "memory": seen.memory, "sum": many.outcome, "bomb": bomb.outcome,
                  "who": who.outcome, "detail": [many.detail, bomb.detail, who.detail]}))
"""


@pytest.mark.parametrize(
    ("name", "level"), [("namespaces", "namespaces"), ("bubblewrap", "namespaces"), ("landlock", "landlock")]
)
def test_an_ordinary_user_has_the_same_limits(name: str, level: str) -> None:
    python, options = sys.executable, {}
    if os.geteuid() == 0:
        # The interpreter of the tests may lie where only root can read.
        python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or python
        options = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
    done = subprocess.run(
        [python, "-c", _SCRIPT, str(_ROOT), name], capture_output=True, text=True, timeout=120, check=False, cwd="/",
        env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    if "No module named 'rollgym" in done.stderr:
        pytest.skip("another user cannot read the package here")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    if "unavailable" in answer:
        pytest.skip(answer["unavailable"])
    assert (answer["level"], answer["sum"], answer["who"]) == (level, "memory_limit", "ok"), answer
    assert answer["bomb"] in ("pids_limit", "time_limit"), answer
