"""`roll-train algorithms`: the presets by name, each with a line and its source, and what one of them sets."""

import sys
import textwrap
from typing import Any

import yaml

from rollgym.trainer.algorithms.correction_presets import CORRECTIONS
from rollgym.trainer.algorithms.presets import PAPERS, PRESETS, known_name
from rollgym.trainer.core.errors import ConfigError

_WIDTH, _NAME = 80, 23


def algorithms(name: str | None) -> int:
    """Print all presets, or the resolved settings of one, in at most 80 columns.

    Args:
        name: A preset or a correction; None lists them.

    Raises:
        ConfigError: If the preset is unknown.
    """
    sys.stdout.write("\n".join([*(listed() if name is None else resolved(name)), ""]))
    return 0


def listed() -> list[str]:
    """Return the list of presets and corrections."""
    lines = ["presets, for algorithm=NAME:", ""]
    for paper in PAPERS.values():
        lines += _entry(paper.name, paper.line, paper.source)
    lines += ["", "corrections of the mismatch, for algorithm.correction=NAME:", ""]
    for name, correction in CORRECTIONS.items():
        lines += _entry(name, correction.line, correction.source)
    return [*lines, "", "roll-train algorithms NAME shows what one of them sets"]


def resolved(name: str) -> list[str]:
    """Return a preset's settings as YAML, with the sources of its numbers as comments.

    Raises:
        ConfigError: If the preset is unknown.
    """
    if name in CORRECTIONS and name not in PRESETS:
        correction = CORRECTIONS[name]
        comments = [f"{name}: {correction.line}", f"source: {correction.source}"]
        return _page(comments, {"correction": correction.settings.model_dump(mode="json")})
    try:
        paper = PAPERS[known_name(name)]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    comments = [f"{paper.name}: {paper.line}", f"source: {paper.source}"]
    if paper.notes:
        comments.append(paper.notes)
    return _page(comments, PRESETS[paper.name].model_dump(mode="json"))


def _page(comments: list[str], settings: dict[str, Any]) -> list[str]:
    lines = [f"# {line}" for comment in comments for line in textwrap.wrap(comment, _WIDTH - 2)]
    written = yaml.safe_dump({"algorithm": _kind_first(settings)}, sort_keys=False, width=_WIDTH)
    return [*lines, *written.splitlines()]


def _kind_first(value: Any) -> Any:
    """Return settings with the kind of each part at its top."""
    if isinstance(value, list):
        return [_kind_first(part) for part in value]
    if not isinstance(value, dict):
        return value
    names = sorted(value, key=lambda name: name != "kind")
    return {name: _kind_first(value[name]) for name in names}


def _entry(name: str, line: str, source: str) -> list[str]:
    """Return a line of the list; a source that does not fit stands below it."""
    start = f"{name:<{_NAME}}{line}"
    whole = start if source == "-" else f"{start} ({source})"
    return [whole] if len(whole) <= _WIDTH else [start, f"{'':{_NAME}}({source})"]
