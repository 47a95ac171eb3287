"""Sources of a catalogue: WebShop's files in a directory, or our own generator."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import orjson

from rollgym.clients.protocol.json_text import read_json
from rollgym.envs.webshop.generator import Records, generate_records

_PAIRS = (
    ("items_shuffle.json", "items_ins_v2.json"),
    ("items_shuffle_1000.json", "items_ins_v2_1000.json"),
)
_SMALL = 1000
_HUMAN = "items_human_ins.json"
_CHUNK = 2**20


class CatalogueError(ValueError):
    """Files of a shop that cannot be used; the message is for the operator."""


class CatalogueSource(Protocol):
    """Gives the parts of a catalogue in WebShop's raw schema."""

    def key(self) -> str:
        """Return a text that differs wherever the parts differ."""
        ...

    def records(self) -> Iterator[Mapping[str, Any]]:
        """Yield the raw product records."""
        ...

    def attributes(self) -> Mapping[str, Mapping[str, Any]]:
        """Return attributes and instructions by product."""
        ...

    def human_instructions(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return what people wrote, by product."""
        ...


class GeneratedSource:
    """The catalogue that ships with the project: made up, by a fixed seed."""

    @cached_property
    def _made(self) -> Records:
        return generate_records()

    def key(self) -> str:
        """Return what tells this catalogue from others."""
        return "generated"

    def records(self) -> Iterator[Mapping[str, Any]]:
        """Yield the raw product records."""
        yield from self._made.products

    def attributes(self) -> Mapping[str, Mapping[str, Any]]:
        """Return attributes and instructions by product."""
        return self._made.attributes

    def human_instructions(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return instructions in the words of customers, by product."""
        return self._made.human_instructions


@dataclass(frozen=True, slots=True)
class FileSource:
    """WebShop's own files.

    Attributes:
        products: File of raw products, one JSON array.
        details: File of attributes and instructions by product.
        human: File of what people wrote, by product, if there is one.
        limit: Products to read, from the first on; all if None.
    """

    products: Path
    details: Path
    human: Path | None
    limit: int | None = None

    def key(self) -> str:
        """Return an identity of these files: their paths, sizes and times."""
        parts = [str(self.limit)]
        for path in (self.products, self.details, self.human):
            if path is not None:
                status = path.stat()
                parts.append(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}")
        return "\n".join(parts)

    def records(self) -> Iterator[Mapping[str, Any]]:
        """Yield the raw products, without ever holding the whole file."""
        return islice(stream_array(self.products), self.limit)

    def attributes(self) -> Mapping[str, Mapping[str, Any]]:
        """Return attributes and instructions by product."""
        return _read_object(self.details)

    def human_instructions(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return what people wrote, by product."""
        return {} if self.human is None else _read_object(self.human)


def find_files(data_dir: Path, limit: int | None = None) -> FileSource:
    """Return the files in a directory: all products if they are there, else the first 1,000.

    Args:
        data_dir: Directory with files under the names that WebShop gives them.
        limit: Products to read.

    Raises:
        CatalogueError: A file is missing.
    """
    pairs = _PAIRS if limit is None or limit > _SMALL else _PAIRS[::-1]
    for names in pairs:
        products, details = (data_dir / name for name in names)
        if products.is_file() and details.is_file():
            human = data_dir / _HUMAN
            return FileSource(products, details, human if human.is_file() else None, limit)
    wanted = " or ".join(" and ".join(names) for names in _PAIRS)
    raise CatalogueError(f"data_dir {data_dir} has no catalogue: put {wanted} there")


def stream_array(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a JSON array, one after another.

    Raises:
        CatalogueError: The file holds something else, or ends too early.
    """
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8") as file:
        text = file.read(_CHUNK).lstrip()
        if not text.startswith("["):
            raise CatalogueError(f"{path} is not a JSON array of products")
        position = 1
        while True:
            while position < len(text) and text[position] in " \t\r\n,":
                position += 1
            if text.startswith("]", position):
                return
            try:
                record, position = decoder.raw_decode(text, position)
            except json.JSONDecodeError as error:
                # Usually the object only continues in the part that was not read yet.
                more = file.read(_CHUNK)
                if not more:
                    raise CatalogueError(f"{path} cannot be read as a JSON array: {error}") from error
                text, position = text[position:] + more, 0
                continue
            if not isinstance(record, dict):
                raise CatalogueError(f"{path} holds {type(record).__name__} where a product should be")
            yield record


def fingerprint(source: CatalogueSource, seed: int) -> str:
    """Return a name for what is built from a source: another one whenever it would come out differently.

    The code that builds it counts, so that what an older version has left is never read.
    """
    text = f"{source.key()}\n{seed}\n{_code()}"
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


@lru_cache(maxsize=1)
def _code() -> str:
    digest = hashlib.blake2b(digest_size=12)
    folder = Path(__file__).parent
    for path in sorted((*folder.glob("*.py"), *folder.glob("*.yaml"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        value = read_json(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise CatalogueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CatalogueError(f"{path} is not a JSON object by product id")
    return value
