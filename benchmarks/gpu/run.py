"""Measure on a GPU what there is time for, in order of worth; what came so far is always written.

    python benchmarks/gpu/run.py --minutes 15 --model FOLDER --output gpu-results
    bash run.sh 15                                   # the same in a folder that pack.py has made: no network is needed
    python benchmarks/gpu/run.py --tiny --minutes 5  # any machine: does each part run?
    python benchmarks/gpu/run.py --minutes 4 --only sampling training

Nothing has to be installed but torch: the tree is run as it is, and packages that pack.py has brought are put on the
path. `gpu.json` holds the figures of every part, and `gpu.log` the end of what each has said.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from packing import unpacked  # noqa: E402
from parts import PARTS, Part, Place  # noqa: E402

from rollgym.clients.measuring.revision import revision  # noqa: E402

_GRACE_S = 15.0
"""A part that is asked to end has so long to write what it has."""
_SAID = 6_000
"""Characters of a part's output that are kept."""


class Results:
    """What has been measured so far, on disk after each part.

    Args:
        folder: Where `gpu.json` and `gpu.log` are written.
        about: What holds for all parts.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._about = about
        self._parts: dict[str, dict[str, Any]] = {}
        self._said: list[str] = []

    def add(self, name: str, found: dict[str, Any], said: str = "") -> None:
        """Keep what a part found and the end of what it said."""
        self._parts[name] = found
        self._said.append(f"===== {name}\n{said[-_SAID:]}\n")
        record = json.dumps(self._about | {"parts": self._parts}, indent=1)
        (self._folder / "gpu.json").write_text(record + "\n", encoding="utf-8")
        (self._folder / "gpu.log").write_text("\n".join(self._said), encoding="utf-8")

    @property
    def failed(self) -> list[str]:
        """Names of parts that ran and did not end well."""
        return [name for name, found in self._parts.items() if found.get("exit_code", 0) != 0]


def measured(part: Part, place: Place, environment: dict[str, str]) -> tuple[dict[str, Any], str]:
    """Run a part within its time, and return its figures and what it said."""
    log = place.work / f"{part.name}.log"
    # What an earlier run has left would be gone on with.
    shutil.rmtree(place.work / part.name, ignore_errors=True)
    place.result(part.name).unlink(missing_ok=True)
    begun = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            part.command(place),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended = _wait(process, place.seconds)
    found: dict[str, Any] = {"exit_code": process.returncode, "seconds": round(time.monotonic() - begun, 1)}
    if not ended:
        found["stopped"] = f"after its {place.seconds:.0f} s"
    figures = place.result(part.name)
    if figures.exists():
        found["figures"] = json.loads(figures.read_text(encoding="utf-8"))
    said = log.read_text(encoding="utf-8", errors="replace")
    if process.returncode:
        found["last_words"] = said.strip().splitlines()[-1:]
    return found, said


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for a program; when its time is over, end it and all that it has started. Return whether it ended itself."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return False
    return True


def about_the_machine(environment: dict[str, str]) -> dict[str, Any]:
    """Name the device and the versions, as a program of the environment sees them."""
    code = (
        "import json, torch, importlib.metadata as m\n"
        "device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None\n"
        "name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else str(device or 'a processor')\n"
        "wanted = 'torch transformers trl deepspeed megatron-core liger-kernel vllm triton'.split()\n"
        "have = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "versions = {n: have[n] for n in wanted if n in have}\n"
        "print(json.dumps({'device': name, 'cuda': torch.version.cuda, 'versions': versions}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"torch does not work with {sys.executable}: {done.stderr.strip().splitlines()[-1:]}"
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="all parts together, installation included"
    )
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--model", type=Path, help="a small instruct model: a folder or a GGUF file")
    parser.add_argument("--packed", type=Path, help="folder that pack.py has made: packages and a model")
    parser.add_argument("--output", type=Path, default=Path("gpu-results"))
    parser.add_argument("--work", type=Path, help="folder for runs (default: OUTPUT/../gpu-work)")
    parser.add_argument("--tiny", action="store_true", help="tiny models, for a machine without a GPU")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    work = (options.work or options.output.absolute().parent / "gpu-work").absolute()
    work.mkdir(parents=True, exist_ok=True)
    paths, model = [str(ROOT)], options.model
    if options.packed is not None:
        packages, packed_model = unpacked(options.packed.absolute(), work)
        paths, model = [str(ROOT), *packages], model or packed_model
    environment = os.environ | {
        # PYTHONPATH may bring torch itself.
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    sys.path[1:1] = paths
    machine = about_the_machine(environment)
    if machine["device"] == "a processor" and not options.tiny:
        raise SystemExit("torch finds no accelerator here: --tiny runs each part on a processor")
    command = " ".join(["python", "benchmarks/gpu/run.py", *sys.argv[1:]])
    about = {"command": command, "commit": revision(), "python": platform.python_version(), **machine}
    results = Results(options.output, about)
    for part in PARTS:
        if part.name not in options.only:
            continue
        left = deadline - time.monotonic() - _GRACE_S
        place = Place(options.tiny, model.absolute() if model else None, work, min(part.limit_s, left))
        if (missing := part.missing(place)) or left < part.least_s:
            found, said = {"not_run": missing or f"{max(left, 0):.0f} s were left"}, ""
        else:
            print(f"{part.name}: {part.about}; at most {place.seconds:.0f} s", flush=True)
            found, said = measured(part, place, environment)
        results.add(part.name, found, said)
        print(
            f"{part.name}: {json.dumps({key: found[key] for key in found if key != 'figures'})}", flush=True
        )
    print(f"figures: {options.output / 'gpu.json'}")
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
