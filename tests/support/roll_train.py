"""`roll-train` started as its console script starts it: no directory of the caller's is on the module path."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.processes import ROOT

_SCRIPT = "import sys\n\nfrom rollgym.trainer.cli import main\n\nsys.exit(main())\n"


def console_script(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `roll-train` in `directory`, with its input and its output as pipes."""
    # Python puts the directory of a script first on the module path, wherever the script is started.
    script = directory / "bin" / "roll-train"
    script.parent.mkdir(exist_ok=True)
    script.write_text(_SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    )
