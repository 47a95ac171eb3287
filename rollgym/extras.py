"""Optional dependencies: which extra brings a package, and the command that installs it.

Imports nothing but the standard library, and that late, so that every floor can use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType

ON_AN_INDEX = False
"""Whether `pip install rollgym` installs this project. Until it is published, that name belongs to no one.

The commit that is published first sets it: the workflow of releases publishes nothing before.
"""

_ARCHIVES = (".whl", ".tar.gz", ".zip")

EXTRAS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "train": (
            "jinja2",
            "markupsafe",
            "huggingface_hub",
            "matplotlib",
            "PIL",
            "safetensors",
            "tensorboard",
            "tokenizers",
            "torch",
            "transformers",
        ),
        "lora": ("peft",),
        "liger": ("liger_kernel",),
        "structured": ("llguidance",),
        "gguf": ("accelerate", "gguf"),
        "vllm": ("vllm",),
        "sglang": ("sglang",),
        "deepspeed": ("deepspeed",),
        "megatron": ("einops", "megatron"),
        "ray": ("ray",),
        "docker": ("docker",),
        "ifeval": ("langdetect", "nltk"),
        "mcp": ("mcp",),
        "pettingzoo": ("chess", "pettingzoo", "pygame", "rlcard"),
        "textarena": ("textarena",),
        "redis": ("redis",),
        "otel": ("opentelemetry.exporter", "opentelemetry.sdk"),
        "math": ("math_verify", "sympy"),
        "reasoning-gym": ("reasoning_gym",),
        "mlflow": ("mlflow",),
        "swanlab": ("swanlab",),
        "wandb": ("wandb",),
        "data": ("datasets", "pyarrow"),
    }
)
"""The modules that each extra of pyproject.toml brings, as they are imported."""

_EXTRA_OF = {module: extra for extra, modules in EXTRAS.items() for module in modules}


class MissingExtraError(ModuleNotFoundError):
    """A package is not installed; the message names the command that installs it.

    Args:
        needs: What needs the package, and the package, such as "model.lora needs the package peft".
        extra: The extra that brings it.
        module: The name of the module that was imported.
    """

    def __init__(self, needs: str, extra: str, module: str | None = None) -> None:
        super().__init__(f"{needs}: {install_line(extra)}", name=module)
        self.extra = extra


def extra_of(module: str) -> str | None:
    """Return the extra that brings a module; None if no extra does."""
    while module:
        if module in _EXTRA_OF:
            return _EXTRA_OF[module]
        module = module.rpartition(".")[0]
    return None


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a module of a package that an extra brings.

    Args:
        module: Its full name.
        extra: The extra.

    Raises:
        MissingExtraError: Its package, or one that it needs, is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        needs = f"{module} needs the package {error.name}, which is not installed"
        raise MissingExtraError(needs, extra, error.name) from error


def missing_extra(error: BaseException, what: str = "this") -> MissingExtraError | None:
    """Return an import error as one that names the extra; None if it is of another kind.

    Args:
        error: What was raised. A module that a user's own code imports is the user's to install, whatever brings it.
        what: What needs the package.
    """
    if isinstance(error, MissingExtraError):
        return error
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    extra = extra_of(error.name)
    if extra is None or not _is_imported_here(error):
        return None
    package = error.name.partition(".")[0]
    needs = f"{what} needs the package {package}, which is not installed"
    return MissingExtraError(needs, extra, error.name)


def require_extra(modules: Iterable[str], extra: str, what: str) -> None:
    """Look for packages that an extra brings before the work that needs them in the end; none is imported.

    Args:
        modules: Their top modules.
        extra: The extra.
        what: What needs them.

    Raises:
        MissingExtraError: One is not installed.
    """
    from importlib.util import find_spec  # Imported late, as the module says.

    for module in modules:
        if find_spec(module) is None:
            raise MissingExtraError(
                f"{what} needs the package {module}, which is not installed", extra, module
            )


def install_line(*extras: str) -> str:
    """Return the command that installs this copy of rollgym with extras.

    A clone is installed from its folder, and a wheel from where it came from: before the project is published, the
    name `rollgym` on an index is not ours.
    """
    from shlex import (
        quote,  # Imported late: the sandbox starts a process for each program, and needs none of this.
    )

    brackets = f"[{','.join(extras)}]" if extras else ""
    clone = Path(__file__).resolve().parents[1]
    if (clone / "pyproject.toml").is_file():  # An installed copy has no such file beside it.
        # Editable, because a clone that is installed in this way stays so.
        return f"pip install -e {quote(_folder(clone) + brackets)}"
    origin = _origin()
    if origin.startswith("file://") and not origin.endswith(_ARCHIVES):
        return f"pip install {quote(_folder(_path(origin)) + brackets)}"
    if origin:
        return f"pip install {quote(f'rollgym{brackets} @ {origin}')}"
    return f"pip install {quote(('rollgym' if ON_AN_INDEX else '.') + brackets)}"


def install_line_of(package: str) -> str:
    """Return the command that installs a package: by the extra that brings it, or by its own name if none does."""
    extra = extra_of(package)
    return f"pip install {package}" if extra is None else install_line(extra)


def _folder(path: Path) -> str:
    return "." if path == Path.cwd() else str(path)


def _path(url: str) -> Path:
    from urllib.parse import unquote, urlsplit

    return Path(unquote(urlsplit(url).path))


def _origin() -> str:
    """Return the address that rollgym was installed from (PEP 610); empty if it came from an index."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        said = json.loads(distribution("rollgym").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return ""
    url, vcs = str(said.get("url", "")), said.get("vcs_info")
    return f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url


def _is_imported_here(error: ModuleNotFoundError) -> bool:
    """Whether the import statement is in rollgym, or in a package that an extra brings."""
    importer = ""
    trace = error.__traceback__
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        if not name.startswith(("importlib", "_frozen_importlib")):
            importer = name
        trace = trace.tb_next
    return importer.partition(".")[0] == "rollgym" or extra_of(importer) is not None
