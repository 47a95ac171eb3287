"""Customers' goals: made from products, or written by people."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from rollgym.envs.webshop.products import Product

_PRICE_STEPS = tuple(10.0 * step for step in range(1, 100))
_STEPS_ABOVE = 4
NO_LIMIT = 1_000_000.0
"""The price limit of goals that name none."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of one customer.

    Attributes:
        asin: The product that the goal was made from.
        name: Its title.
        query: Its query.
        category: Its department.
        product_category: Its place in the shop's tree.
        instruction: The customer's request.
        attributes: Required attributes of the product.
        options: Options to choose: by name in generated goals, values alone in those that people wrote.
        price_upper: Highest price.
        weight: Relative frequency of being drawn.
    """

    asin: str
    name: str
    query: str
    category: str
    product_category: str
    instruction: str
    attributes: tuple[str, ...]
    options: Mapping[str, str] | tuple[str, ...]
    price_upper: float
    weight: float


@dataclass(frozen=True, slots=True)
class HumanInstruction:
    """A person's request for a product.

    Attributes:
        text: The instruction, without a price.
        attributes: Required attributes of the product.
        options: Values that must be chosen.
        price_upper: Highest price.
    """

    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_upper: float


def draw_prices(products: Iterable[Product], source: random.Random) -> list[float]:
    """Return what each product really costs: its price, or one within its range."""
    return [
        product.pricing[0] if len(product.pricing) == 1 else source.uniform(*product.pricing)
        for product in products
    ]


def draw_limit(price: float, source: random.Random) -> float:
    """Draw what a customer would pay at most for what costs `price`."""
    above = [step for step in _PRICE_STEPS if step > price][:_STEPS_ABOVE]
    return max(source.sample(above, 2)) if len(above) >= 2 else NO_LIMIT


def asked_for(product: Product) -> bool:
    """Whether goals are generated for a product."""
    return product.instruction is not None and bool(product.instruction_attributes)


def combinations(product: Product) -> int:
    """Return how many goals are generated for a product: one for each choice of options."""
    return math.prod(len(values) for values in product.options.values())


def attribute_counts(products: Iterable[Product]) -> Counter[str]:
    """Count the generated goals that name each attribute."""
    counts: Counter[str] = Counter()
    for product in products:
        for attribute in product.instruction_attributes if asked_for(product) else ():
            counts[attribute] += combinations(product)
    return counts


def goal_weight(attributes: Sequence[str], counts: Mapping[str, int]) -> float:
    """Return the weight of a generated goal: rare attributes weigh more."""
    # From 3.12 on Python's own sum rounds once and not at each step: the last digit of a weight would depend on it.
    return reduce(add, (1.0 / counts[attribute] for attribute in attributes)) / len(attributes)


def generated_goal(product: Product, choice: int, price_upper: float, weight: float) -> Goal:
    """Return the goal for one of a product's choices of options."""
    names = sorted(product.options)
    lists = [product.options[name] for name in names]
    values = next(itertools.islice(itertools.product(*lists), choice, None))
    options = dict(zip(names, values, strict=True))
    said = ", and ".join(f"{name}: {value}" for name, value in options.items())
    return _goal(
        product,
        text=f"{product.instruction}{' with ' if said else ''}{said}",
        attributes=product.instruction_attributes,
        options=options,
        price_upper=price_upper,
        weight=weight,
    )


def human_goal(product: Product, instruction: HumanInstruction) -> Goal:
    """Return the goal of what a person wrote."""
    return _goal(
        product,
        text=instruction.text.strip("."),
        attributes=instruction.attributes,
        options=instruction.options,
        price_upper=instruction.price_upper,
        weight=1.0,
    )


def read_human_instructions(
    entries: Sequence[Mapping[str, Any]], price: float, source: random.Random
) -> Iterator[HumanInstruction]:
    """Yield the instructions of one product, with limits drawn; those that name no attribute are left out."""
    for entry in entries:
        if entry["instruction_attributes"]:
            yield HumanInstruction(
                text=entry["instruction"],
                attributes=tuple(entry["instruction_attributes"]),
                options=tuple(entry["instruction_options"]),
                price_upper=draw_limit(price, source),
            )


def _goal(
    product: Product,
    *,
    text: str,
    attributes: tuple[str, ...],
    options: Mapping[str, str] | tuple[str, ...],
    price_upper: float,
    weight: float,
) -> Goal:
    limit = "" if price_upper == NO_LIMIT else f", and price lower than {price_upper:.2f} dollars"
    return Goal(
        asin=product.asin,
        name=product.title,
        query=product.query,
        category=product.category,
        product_category=product.product_category,
        instruction=text + limit,
        attributes=attributes,
        options=options,
        price_upper=price_upper,
        weight=weight,
    )
