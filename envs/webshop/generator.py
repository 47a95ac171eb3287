"""The made-up catalogue, in WebShop's raw schema: always the same one, made from a fixed seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

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
