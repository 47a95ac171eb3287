"""Sources of a catalogue: WebShop's files in a directory, or our own generator, whose seed is fixed."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
import yaml

from rollgym.clients.protocol.json_text import read_json

_TABLES = Path(__file__).with_name("merchandise.yaml")
_SEED = 20_241
_PER_KIND, _CUSTOMERS = 80, 4
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PRAISE = ("what you expect of", "a pleasure in", "seldom found in", "tried and proven in")
_HAS_RANGE, _HAS_NO_PRICE, _HAS_OPTION, _IS_ASKED_FOR = 0.12, 0.02, 0.8, 0.9


@dataclass(frozen=True, slots=True)
class Records:
    """A catalogue in the raw schema.

    Attributes:
        products: Raw products.
        attributes: Attributes and instructions by product.
        human_instructions: Instructions in the words of customers, by product.
    """

    products: Sequence[dict[str, Any]]
    attributes: dict[str, dict[str, Any]]
    human_instructions: dict[str, list[dict[str, Any]]]


def generate_records(per_kind: int = _PER_KIND) -> Records:
    """Return the catalogue.

    Args:
        per_kind: Products of each kind; there are 25 kinds.
    """
    tables = yaml.safe_load(_TABLES.read_text(encoding="utf-8"))
    maker = _Maker(np.random.Generator(np.random.PCG64(_SEED)), tables)
    kinds = [
        (name, department, kind)
        for name, department in tables["departments"].items()
        for kind in department["kinds"]
    ]
    made: dict[str, tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = {}
    for index in maker.draw.permutation(len(kinds) * per_kind).tolist():
        asin = maker.asin()
        while asin in made:
            asin = maker.asin()
        made[asin] = maker.product(asin, *kinds[index % len(kinds)])
    return Records(
        [product for product, _, _ in made.values()],
        {asin: facts for asin, (_, facts, _) in made.items()},
        {asin: said for asin, (_, _, said) in made.items() if said},
    )


class _Maker:
    """Makes products from tables, one draw after another."""

    def __init__(self, draw: np.random.Generator, tables: Mapping[str, Any]) -> None:
        self.draw = draw
        self._tables = tables

    def asin(self) -> str:
        return "B0" + "".join(_LETTERS[int(index)] for index in self.draw.integers(len(_LETTERS), size=8))

    def product(
        self, asin: str, category: str, department: Mapping[str, Any], kind: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
        """Return a raw record, its attributes, and the request of customers for it."""
        draw, name = self.draw, kind["name"]
        traits = self._some(kind["traits"], 1, 2) + self._some(department["traits"], 2, 4)
        traits = self._some(traits, len(traits), len(traits))
        brand, line = self._one(self._tables["brands"]), self._one(self._tables["lines"])
        title = " ".join([brand, line, *(trait.title() for trait in traits[:2]), name.title()])
        lists = [self._tables["options"][each] for each in kind["options"] if draw.random() < _HAS_OPTION]
        options = {each["name"]: self._some(each["values"], 2, 5, in_order=True) for each in lists}
        record = {
            "asin": asin,
            "name": title,
            "category": category,
            "query": name,
            "product_category": " › ".join([department["title"], *kind["path"]]),
            "full_description": f"{title} by {brand}. {', '.join(traits).capitalize()}: "
            f"good {self._one(department['purposes'])}.",
            "small_description": [f"{trait.title()}: {self._one(_PRAISE)} {name}" for trait in traits],
            "pricing": self._pricing(*kind["prices"]),
            "images": [f"https://images.example/{asin}.jpg"],
            "customization_options": {
                each: [{"value": value, "image": None} for value in values]
                for each, values in options.items()
            },
        }
        facts: dict[str, Any] = {"attributes": traits}
        said: list[dict[str, Any]] = []
        if draw.random() < _IS_ASKED_FOR:
            wanted = self._some(traits, 1, 3)
            facts |= {"instruction": f"Find me {', '.join(wanted)} {name}", "instruction_attributes": wanted}
            requests = [self._request(asin, kind, traits, options) for _ in range(_CUSTOMERS)]
            # No two customers want the same: what is held out is asked for nowhere else.
            said += {_wish(request): request for request in requests}.values()
        return record, facts, said

    def _request(
        self, asin: str, kind: Mapping[str, Any], traits: list[str], options: Mapping[str, list[str]]
    ) -> dict[str, Any]:
        wanted = self._some(traits, 1, 3)
        chosen = {
            name.lower(): self._one(values).lower().replace("/", " | ") for name, values in options.items()
        }
        choices = self._tables["choices"]
        article = "" if kind.get("plural") else "an " if kind["name"][0] in "aeio" else "a "
        text = self._one(self._tables["requests"]).format(
            kind=kind["name"],
            article=article,
            traits=wanted[0] if len(wanted) == 1 else f"{', '.join(wanted[:-1])} and {wanted[-1]}",
            choice="".join(f" {choices[name].format(value=value)}" for name, value in chosen.items()),
        )
        return {
            "asin": asin,
            "instruction": text,
            "instruction_attributes": wanted,
            "instruction_options": list(chosen.values()),
        }

    def _pricing(self, lowest: float, highest: float) -> str | None:
        price = float(np.exp(self.draw.uniform(np.log(lowest), np.log(highest))))
        fate = self.draw.random()
        if fate < _HAS_NO_PRICE:
            return None
        if fate < _HAS_NO_PRICE + _HAS_RANGE:
            return f"${price:,.2f}${price * self.draw.uniform(1.2, 1.8):,.2f}"
        return f"${price:,.2f}"

    def _one(self, values: Sequence[str]) -> str:
        return values[int(self.draw.integers(len(values)))]

    def _some(self, values: Sequence[str], least: int, most: int, *, in_order: bool = False) -> list[str]:
        count = int(self.draw.integers(least, min(most, len(values)) + 1))
        indices = self.draw.permutation(len(values))[:count].tolist()
        return [values[index] for index in (sorted(indices) if in_order else indices)]


def _wish(request: Mapping[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    return frozenset(request["instruction_attributes"]), frozenset(request["instruction_options"])


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
