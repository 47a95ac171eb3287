"""A catalogue: products, their prices, goals and the search index, on disk and shared by all processes.

It is built once on a machine and cached; other processes wait for the one that builds.
"""

import fcntl
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from rollgym.envs.webshop.goals import (
    Goal,
    HumanInstruction,
    asked_for,
    attribute_counts,
    combinations,
    draw_limit,
    draw_prices,
    generated_goal,
    goal_weight,
    human_goal,
    read_human_instructions,
)
from rollgym.envs.webshop.products import Product, read_products, search_text
from rollgym.envs.webshop.search import (
    Facets,
    IndexWriter,
    Rows,
    SearchIndex,
    SortedKeys,
    read_array,
    write_array,
    write_facets,
    write_rows,
    write_sorted_keys,
)
from rollgym.envs.webshop.sources import (
    CatalogueError,
    CatalogueSource,
    GeneratedSource,
    find_files,
    fingerprint,
)
from rollgym.user_paths import expand_user

GoalKind = Literal["human", "synthetic"]
_LOAD_SEED = 1234
"""Seed for prices within a range and for customers' limits; the original leaves it open."""

_ORDER_SEED = 233
_KEPT_PRODUCTS = 512
_FIELDS = [field.name for field in fields(Product)]
_TUPLES = [
    _FIELDS.index(name) for name in ("bullet_points", "pricing", "attributes", "instruction_attributes")
]
_OPTIONS = _FIELDS.index("options")


def build_catalogue(source: CatalogueSource, folder: Path, seed: int = _LOAD_SEED) -> None:
    """Read a source once and write its catalogue into an empty folder.

    Args:
        source: Source of the products.
        folder: Target folder of the catalogue.
        seed: Seed of prices and limits.
    """
    index = IndexWriter()
    asins: list[str] = []

    def rows() -> Iterator[bytes]:
        for product in read_products(source.records(), source.attributes()):
            asins.append(product.asin)
            index.add(search_text(product))
            yield orjson.dumps(astuple(product))

    write_rows(folder, "products", rows())
    products = _Products(folder)
    index.write(folder)
    write_facets(folder, map(_facets, products))
    key_indices = write_sorted_keys(folder, "asins", asins)
    write_array(folder, "asin_products", np.argsort(np.asarray(key_indices, dtype=np.int64)).astype(np.int32))
    draw = random.Random(seed)
    prices = draw_prices(products, draw)
    write_array(folder, "prices", np.asarray(prices, dtype=np.float64))
    # The original draws the limits of either kind of goals right after the prices.
    state = draw.getstate()
    _write_generated_goals(folder, products, prices, draw)
    draw.setstate(state)
    _write_human_goals(folder, source, asins, prices, draw)


class Catalogue:
    """A catalogue that was built, opened.

    Args:
        folder: The folder that it was written to.
    """

    def __init__(self, folder: Path) -> None:
        self._products = _Products(folder)
        self._asins = SortedKeys(folder, "asins")
        self._asin_products = read_array(folder, "asin_products")
        self._prices = read_array(folder, "prices")
        self.index = SearchIndex(folder, len(self._products))
        self.facets = Facets(folder)
        self._goals: dict[GoalKind, Goals] = {
            "human": HumanGoals(folder, self),
            "synthetic": GeneratedGoals(folder, self),
        }
        self._product = lru_cache(maxsize=_KEPT_PRODUCTS)(self._products.__getitem__)

    def __len__(self) -> int:
        return len(self._products)

    def product(self, number: int) -> Product:
        """Return a product by its number, in the order of the file."""
        found: Product = self._product(number)
        return found

    def number(self, asin: str) -> int | None:
        """Return the number of a product; None if the id is unknown."""
        index = self._asins.find(asin)
        return None if index is None else int(self._asin_products[index])

    def price(self, number: int) -> float:
        """Return the price of a product."""
        return float(self._prices[number])

    def goals(self, kind: GoalKind) -> "Goals":
        """Return the goals of a kind."""
        return self._goals[kind]


class Goals(Sequence[Goal]):
    """Goals in the order in which WebShop counts them, made when they are asked for."""

    def __init__(self, folder: Path, kind: GoalKind, catalogue: Catalogue) -> None:
        self._order = read_array(folder, f"{kind}_order")
        self._weights_below = read_array(folder, f"{kind}_weights_below")
        self._catalogue = catalogue

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no goal {index}: there are {len(self)}, counted from 0")
        return self._make(int(self._order[index]))

    def _make(self, number: int) -> Goal:
        raise NotImplementedError

    def draw(self, generator: np.random.Generator, among: range, *, by_weight: bool) -> int:
        """Draw the index of a goal in a range, each as likely as any other or by their weights."""
        if not by_weight:
            return among.start + int(generator.integers(len(among)))
        low, high = self._weights_below[among.start], self._weights_below[among.stop]
        index = int(np.searchsorted(self._weights_below, generator.uniform(low, high), side="right")) - 1
        return min(max(index, among.start), among.stop - 1)


class GeneratedGoals(Goals):
    """A goal for each choice of options of each product that has an instruction."""

    def __init__(self, folder: Path, catalogue: Catalogue) -> None:
        super().__init__(folder, "synthetic", catalogue)
        self._owners = read_array(folder, "synthetic_products")
        self._ends = read_array(folder, "synthetic_ends")
        self._limits = read_array(folder, "synthetic_limits")
        self._weights = read_array(folder, "synthetic_weights")

    def _make(self, number: int) -> Goal:
        row = int(np.searchsorted(self._ends, number, side="right"))
        choice = number - (int(self._ends[row - 1]) if row else 0)
        product = self._catalogue.product(int(self._owners[row]))
        return generated_goal(product, choice, float(self._limits[row]), float(self._weights[row]))


class HumanGoals(Goals):
    """Shopping goals that people wrote."""

    def __init__(self, folder: Path, catalogue: Catalogue) -> None:
        super().__init__(folder, "human", catalogue)
        self._rows = Rows(folder, "human")

    def _make(self, number: int) -> Goal:
        owner, text, attributes, options, limit = orjson.loads(self._rows[number])
        instruction = HumanInstruction(text, tuple(attributes), tuple(options), limit)
        return human_goal(self._catalogue.product(owner), instruction)


class _Products(Sequence[Product]):
    def __init__(self, folder: Path) -> None:
        self._rows = Rows(folder, "products")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        row = orjson.loads(self._rows[index])
        for field in _TUPLES:
            row[field] = tuple(row[field])
        row[_OPTIONS] = {name: tuple(values) for name, values in row[_OPTIONS].items()}
        return Product(*row)


def _facets(product: Product) -> Iterator[str]:
    yield f"c {product.category}"
    yield f"q {product.query}"
    for attribute in product.attributes:
        yield f"a {attribute}"


def _write_generated_goals(
    folder: Path, products: Sequence[Product], prices: Sequence[float], draw: random.Random
) -> None:
    counts = attribute_counts(products)
    owners, limits, weights, numbers = [], [], [], []
    for owner, product in enumerate(products):
        if asked_for(product):
            owners.append(owner)
            limits.append(draw_limit(prices[owner], draw))
            numbers.append(combinations(product))
            # A product whose option has no value gives no goals, and its attributes may never be counted.
            weights.append(goal_weight(product.instruction_attributes, counts) if numbers[-1] else 0.0)
    ends = np.cumsum(numbers, dtype=np.int64)
    write_array(folder, "synthetic_products", np.asarray(owners, dtype=np.int32))
    write_array(folder, "synthetic_ends", ends)
    write_array(folder, "synthetic_limits", np.asarray(limits, dtype=np.float64))
    write_array(folder, "synthetic_weights", np.asarray(weights, dtype=np.float64))
    _write_order(folder, "synthetic", np.repeat(np.asarray(weights, dtype=np.float64), numbers))


def _write_human_goals(
    folder: Path,
    source: CatalogueSource,
    asins: Sequence[str],
    prices: Sequence[float],
    draw: random.Random,
) -> None:
    written = source.human_instructions()
    count = 0

    def rows() -> Iterator[bytes]:
        nonlocal count
        for owner, asin in enumerate(asins):
            for one in read_human_instructions(written.get(asin, ()), prices[owner], draw):
                count += 1
                yield orjson.dumps([owner, *astuple(one)])

    write_rows(folder, "human", rows())
    _write_order(folder, "human", np.ones(count))


def _write_order(folder: Path, kind: GoalKind, weights: NDArray[np.float64]) -> None:
    order = list(range(len(weights)))
    random.Random(_ORDER_SEED).shuffle(order)
    ordered = np.asarray(order, dtype=np.int64)
    write_array(folder, f"{kind}_order", ordered)
    write_array(folder, f"{kind}_weights_below", np.concatenate(([0.0], np.cumsum(weights[ordered]))))


_log = logging.getLogger(__name__)


def open_catalogue(
    data_dir: str | None = None, num_products: int | None = None, cache_dir: str | None = None
) -> Catalogue:
    """Open a catalogue; it is built first if that was never done. A process opens each one once.

    Args:
        data_dir: Directory with WebShop's files; None for the catalogue that ships with the project.
        num_products: Products to read of those files.
        cache_dir: Folder of the catalogues.

    Raises:
        CatalogueError: The files cannot be used, or nothing can be kept in `cache_dir`.
    """
    source: CatalogueSource = (
        GeneratedSource() if data_dir is None else find_files(Path(expand_user(data_dir)), num_products)
    )
    key = fingerprint(source, _LOAD_SEED)
    folder = Path(expand_user(cache_dir)) if cache_dir is not None else default_cache()
    try:
        return _opened(_kept(source, folder / f"webshop-{key}"))
    except OSError as error:
        raise CatalogueError(
            f"no catalogue can be kept in {folder} ({error.strerror}): set the operator kwarg cache_dir, or "
            "XDG_CACHE_HOME, to a directory that can be written"
        ) from error


def default_cache() -> Path:
    """Return the default folder of the catalogues."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollgym"


@lru_cache(maxsize=4)
def _opened(folder: Path) -> Catalogue:
    return Catalogue(folder)


def _kept(source: CatalogueSource, folder: Path) -> Path:
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_suffix(".lock")):
        if folder.is_dir():
            return folder
        _log.info("building the catalogue %s", folder)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        try:
            build_catalogue(source, unfinished)
            # All users may read it, no matter which one built it.
            unfinished.chmod(0o755)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
