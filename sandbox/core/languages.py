"""How a program in each language is compiled and started."""

import itertools
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollgym.sandbox.core.base import Language, Program

WORKING_DIRECTORY = "/work"
# Nothing of the server's own environment reaches a program. A fixed hash seed makes equal runs equal.
ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORKING_DIRECTORY,
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
_ENDINGS: Mapping[Language, str] = {"python": ".py", "bash": ".sh", "cpp": ".cpp"}
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The interpreters and the compiler, by their paths inside the sandbox.

    Attributes:
        python: Python 3.
        bash: The shell.
        cxx: A C++ compiler that knows GCC's options; None if there is none.
    """

    python: str = "/usr/bin/python3"
    bash: str = "/bin/bash"
    cxx: str | None = "/usr/bin/g++"


@dataclass(frozen=True, slots=True)
class Commands:
    """The commands for a program.

    Attributes:
        source_name: The file that its source goes to, in the working directory.
        compile: The compiler's command line; None for an interpreted language.
        run: The program's command line.
        binary_name: The file that the compiler makes there; empty for an interpreted language.
    """

    source_name: str
    compile: tuple[str, ...] | None
    run: tuple[str, ...]
    binary_name: str = ""


class MissingToolError(LookupError):
    """The machine has no interpreter or compiler for a language."""


def host_toolchain() -> Toolchain:
    """Look for interpreters in the system directories, which every back-end shows to programs."""
    own = Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    in_system = own.is_file() and own.is_relative_to("/usr")
    python = str(own) if in_system else shutil.which("python3", path=_SYSTEM_PATH)
    return Toolchain(
        # Without a Python of the system, the one that runs this; its directory must then be shown, too.
        python=python or str(own),
        bash=shutil.which("bash", path=_SYSTEM_PATH) or "/bin/bash",
        cxx=shutil.which("g++", path=_SYSTEM_PATH) or shutil.which("clang++", path=_SYSTEM_PATH),
    )


def commands(
    program: Program,
    toolchain: Toolchain,
    directory: str = WORKING_DIRECTORY,
    files: Iterable[str] = (),
) -> Commands:
    """Return the commands that compile and run a program.

    Args:
        program: The program.
        toolchain: The interpreters and the compiler.
        directory: Its working directory, as the program sees it.
        files: Paths of the other files; the program's own file gets a name that differs from all of them.

    Raises:
        MissingToolError: If no compiler was found for its language.
    """
    stem, ending = _free_stem({path.partition("/")[0] for path in files}), _ENDINGS[program.language]
    name = stem + ending
    source = f"{directory}/{name}"
    if program.language == "python":
        return Commands(name, None, (toolchain.python, source, *program.arguments))
    if program.language == "bash":
        return Commands(name, None, (toolchain.bash, source, *program.arguments))
    if toolchain.cxx is None:
        raise MissingToolError("there is no C++ compiler in the sandbox: install g++")
    binary = f"{directory}/{stem}"
    compiler = (toolchain.cxx, "-std=c++17", "-O2", "-pipe", "-o", binary, source)
    return Commands(name, compiler, (binary, *program.arguments), stem)


def _free_stem(taken: Collection[str]) -> str:
    """Return `main`, or another name if a file of any language already has that stem."""
    names = itertools.chain(("main", "program"), (f"program_{number}" for number in itertools.count(2)))
    return next(
        name
        for name in names
        if name not in taken and all(name + ending not in taken for ending in _ENDINGS.values())
    )
