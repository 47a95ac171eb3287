"""Rows of data sets, read from files: JSON lines, a JSON list, Parquet, or what Hugging Face's `datasets` loads."""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from rollgym.clients.protocol.json_text import DEEPEST, is_shallow
from rollgym.extras import install_line
from rollgym.trainer.config.data import RowsSettings
from rollgym.trainer.core.errors import ConfigError

_BATCH_ROWS = 1024
_SHOWN = 60
_MOST_COLUMNS = 12
_NINETEEN_DIGITS = re.compile(rb"\d{19}")
"""Fewer digits have at most 60 bits."""

Row = dict[str, Any]


class RowPlace(NamedTuple):
    """Where a row stands.

    Attributes:
        source: What its file or data set is called, and what is counted there: lines from 1, rows from 0.
        number: Its number.
    """

    source: str
    number: int

    def __str__(self) -> str:
        """Return it for a message."""
        return f"{self.source} {self.number}"


def columns_of(row: Row) -> str:
    """Return the names of a row's columns, as many as a message has room for."""
    names = [str(name)[:_SHOWN] for name in list(row)[:_MOST_COLUMNS]]
    more = len(row) - len(names)
    return ", ".join([*names, f"and {more} more"] if more else names)


def read_rows(settings: RowsSettings) -> Iterator[tuple[RowPlace, Row]]:
    """Read the rows of a data set, each with its place in the source.

    Raises:
        ConfigError: If it cannot be read; the message names the file, and the line if it is known.
    """
    if settings.path is None:
        yield from _hub_rows(settings)
        return
    path = Path(settings.path)
    if path.is_dir():
        yield from _saved_rows(settings, path)
        return
    if settings.split is not None:
        raise ConfigError(f"data set {path}: a file has no splits; leave 'split' out")
    try:
        match path.suffix:
            case ".jsonl":
                yield from _lines(path)
            case ".json":
                yield from _list(path)
            case ".parquet":
                yield from _parquet_rows(path)
            case _:
                raise ConfigError(
                    f"data set {path}: name a file that ends in .jsonl, .json or .parquet, or a folder"
                )
    except OSError as error:
        raise ConfigError(f"data set {path} cannot be read: {error.strerror or error}") from error


def _lines(path: Path) -> Iterator[tuple[RowPlace, Row]]:
    source = f"{path}, line"
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                place = RowPlace(source, number)
                yield place, _row(line if number > 1 else line.removeprefix(BOM_UTF8), place)


def _row(line: bytes, place: RowPlace) -> Row:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        shown = line[:_SHOWN].decode(errors="replace").strip()
        raise ConfigError(f"data set {place}: {error}: {shown!r}") from error
    _refuse_large_integers(line, place)
    return _checked(row, place)


def _refuse_large_integers(text: bytes, place: object) -> None:
    """Refuse what the reader has rounded: it makes floats of integers beyond 64 bits.

    Raises:
        ConfigError: If there is one.
    """
    if _NINETEEN_DIGITS.search(text) is None:
        return
    large: list[str] = []

    def note(digits: str) -> int:
        if len(digits) > 18 and not -(1 << 63) <= int(digits[:40]) < 1 << 64:
            large.append(digits)
        return 0

    try:
        json.loads(text, parse_int=note)
    except RecursionError as error:
        raise ConfigError(
            f"data set {place}: it is nested too deep, beside an integer of many digits"
        ) from error
    if large:
        shown = large[0] if len(large[0]) <= 40 else f"{large[0][:40]}..."
        raise ConfigError(
            f'data set {place}: the integer {shown} has more than 64 bits: write it as text ("{shown}")'
        )


def _list(path: Path) -> Iterator[tuple[RowPlace, Row]]:
    try:
        # As lines are read: Python's own reader lets through what no JSON is, such as NaN and half a character.
        content = path.read_bytes().removeprefix(BOM_UTF8)
        rows = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"data set {path} is no JSON: {error}") from error
    _refuse_large_integers(content, path)
    if not isinstance(rows, list):
        raise ConfigError(f"data set {path} must hold a list of rows")
    for number, row in enumerate(rows):
        place = RowPlace(f"{path}, row", number)
        yield place, _checked(row, place)


def _checked(row: Any, place: RowPlace) -> Row:
    if not isinstance(row, dict):
        raise ConfigError(f"data set {place}: a row must be a JSON object, not {type(row).__name__}")
    if not is_shallow(row):
        raise ConfigError(
            f"data set {place}: the row is nested more than {DEEPEST} deep: write what is as JSON text, or leave it out"
        )
    return row


def _parquet_rows(path: Path) -> Iterator[tuple[RowPlace, Row]]:
    try:
        # No part of the base install.
        import pyarrow.parquet as parquet
        from pyarrow import ArrowException
    except ImportError as error:
        raise ConfigError(f"data set {path} needs pyarrow: {install_line('data')}") from error
    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for row in batch.to_pylist():
                    place = RowPlace(f"{path}, row", number)
                    yield place, _checked(row, place)
                    number += 1
    except ArrowException as error:
        raise ConfigError(f"data set {path} is no Parquet file: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"data set {path}: a text behind row {number} is not UTF-8: {error}") from error


def _saved_rows(settings: RowsSettings, path: Path) -> Iterator[tuple[RowPlace, Row]]:
    datasets = _library(settings)
    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"data set {path} cannot be loaded: {error}") from error
    yield from _split_rows(settings, found)


def _hub_rows(settings: RowsSettings) -> Iterator[tuple[RowPlace, Row]]:
    datasets = _library(settings)
    try:
        found = datasets.load_dataset(settings.hub, settings.subset)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"data set {settings.hub} cannot be loaded: {error}; without a network name a file of its rows (path), or "
            "fetch it elsewhere and set HF_HOME to that cache and HF_HUB_OFFLINE=1"
        ) from error
    yield from _split_rows(settings, found)


def _library(settings: RowsSettings) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"data set {settings.name} needs Hugging Face's datasets: {install_line('data')}"
        ) from error
    return datasets


def _split_rows(settings: RowsSettings, found: Any) -> Iterator[tuple[RowPlace, Row]]:
    if isinstance(found, dict):
        names = ", ".join(found)
        if settings.split is None and len(found) == 1:
            (found,) = found.values()
        elif settings.split in found:
            found = found[settings.split]
        else:
            raise ConfigError(f"data set {settings.name} has the splits {names}: name one of them as 'split'")
    elif settings.split is not None:
        raise ConfigError(f"data set {settings.name} has no splits; leave 'split' out")
    for number, row in enumerate(found):
        place = RowPlace(f"{settings.name}, row", number)
        yield place, _checked(dict(row), place)
