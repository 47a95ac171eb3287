"""Install the peers, each in a virtual environment of its own, into a folder that you name.

    python benchmarks/serving/other_servers/install.py ~/.cache/rollgym/peers [--python /path/to/python3.12]

NeMo Gym 0.4.0 needs Python 3.12; it is left out where none is found. Later versions need a newer 3.13 than is common.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

SHARED = ("uvloop", "httptools", "gymnasium", "numpy")
PEERS = {
    "openenv": (("openenv==0.10.0",), (3, 11)),
    "aviary": (("fhaviary[server]==0.37.0",), (3, 11)),
    "nemo-gym": (("nemo-gym==0.4.0",), (3, 12)),
    "openreward": (("openreward==0.1.167",), (3, 11)),
}


def interpreters(folder: Path) -> dict[str, str]:
    """The interpreters of the peers that are installed."""
    found = {
        name: folder / name / "bin" / "python" for name in PEERS if (folder / name / "installed").exists()
    }
    return {name: str(python) for name, python in found.items()}


def install(folder: Path, pythons: list[str]) -> None:
    """Install what is missing; a peer that cannot be installed is named and left out."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (packages, oldest) in PEERS.items():
        if name in interpreters(folder):
            continue
        python = _python(oldest, pythons)
        if python is None:
            print(f"{name}: needs Python {oldest[0]}.{oldest[1]}, see --python", file=sys.stderr)
            continue
        print(f"{name}: installing {' '.join(packages)}", file=sys.stderr)
        target = folder / name
        commands = (
            [python, "-m", "venv", "--clear", str(target)],
            [str(target / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages, *SHARED],
        )
        if all(subprocess.run(command, check=False).returncode == 0 for command in commands):
            (target / "installed").touch()
        else:
            print(f"{name}: could not be installed", file=sys.stderr)


def _python(oldest: tuple[int, int], given: list[str]) -> str | None:
    """The first interpreter that works and is new enough."""
    names = [sys.executable, *given, "python3.12", "python3.13", "python3.14"]
    for path in filter(None, map(shutil.which, names)):
        check = f"import sys; sys.exit(sys.version_info < {oldest})"
        if subprocess.run([path, "-c", check], stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return path
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", action="append", default=[], help="an interpreter to try (repeatable)")
    options = parser.parse_args()
    install(options.folder, options.python)
    print("\n".join(f"{name}: {python}" for name, python in interpreters(options.folder).items()))
