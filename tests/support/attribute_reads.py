"""Which attributes of which classes code reads, as the type checker understands it.

A name alone says little: `.path` may be read of a hundred things. mypy knows the class of every expression and tells a
plugin of each attribute that it looks up; this module is that plugin, and what runs mypy with it.
"""

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from mypy.plugin import AttributeContext, Plugin
from mypy.types import Type

_LOG = "ATTRIBUTE_READS_LOG"
# Nothing of these libraries is needed to know our own classes, and to read them takes minutes.
_UNREAD = (
    *("torch", "transformers", "numpy", "gymnasium", "deepspeed", "huggingface_hub", "httpx"),
    *("jinja2", "matplotlib", "openai", "orjson", "peft", "prometheus_client", "ray"),
    *("rich", "safetensors", "starlette", "tokenizers", "uvicorn", "websockets", "yaml"),
)
_SETTINGS = """[mypy]
plugins = {plugin}
follow_imports = silent
ignore_missing_imports = true
[mypy-{unread}]
follow_imports = skip
"""


class Recorder(Plugin):
    """Writes down each attribute and the file that reads it."""

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type]:
        """Note a look-up of `module.Class.attribute`."""

        def note(context: AttributeContext) -> Type:
            _log().write(f"{fullname}\t{context.api.path}\n")
            return context.default_attr_type

        return note


@functools.cache
def _log() -> TextIO:
    """Where it is written down; the end of the process closes it."""
    return open(os.environ[_LOG], "a", encoding="utf-8", buffering=1)


def plugin(version: str) -> type[Plugin]:
    """Return the plugin; mypy calls this."""
    return Recorder


def attribute_reads(directory: Path, package: str, scratch: Path) -> dict[str, set[Path]]:
    """Return where each `module.Class.attribute` is read in a package.

    Args:
        directory: Where the package lies.
        package: Its name.
        scratch: A directory for the checker.
    """
    settings, log = scratch / "mypy.ini", scratch / "reads"
    settings.write_text(_SETTINGS.format(plugin=__file__, unread=",".join(f"{name}.*" for name in _UNREAD)))
    log.touch()
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(settings), "--no-incremental", "-p", package],
        cwd=directory,
        env=os.environ | {_LOG: str(log)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    # 1 says that there are type errors: without the libraries above there are.
    assert result.returncode in (0, 1), result.stdout + result.stderr
    reads: dict[str, set[Path]] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        name, path = line.split("\t")
        reads.setdefault(name, set()).add((directory / path).resolve())
    return reads
