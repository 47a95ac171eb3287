"""The shop's data: products with variants, customers, orders. Generated for every episode, plain JSON throughout."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Database = dict[str, Any]
"""`products`, `users` and `orders`, each by id. Prices are whole dollars."""

_PRODUCTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "desk lamp": {"colour": ("black", "white", "green"), "power": ("mains", "battery")},
    "backpack": {"colour": ("grey", "blue", "red"), "size": ("20 litres", "30 litres")},
    "kettle": {"material": ("steel", "glass"), "capacity": ("1 litre", "2 litres")},
    "running shoes": {"size": ("38", "40", "42", "44"), "colour": ("black", "white")},
    "wall clock": {"colour": ("oak", "walnut", "white"), "diameter": ("25 cm", "35 cm")},
    "headphones": {"colour": ("black", "silver", "blue"), "connection": ("cable", "wireless")},
    "rain jacket": {"size": ("S", "M", "L", "XL"), "colour": ("yellow", "navy")},
    "chess set": {"material": ("wood", "marble", "plastic"), "size": ("travel", "tournament")},
}
_FIRST = (
    "Amara",
    "Boris",
    "Chloe",
    "Daan",
    "Elif",
    "Farah",
    "Goran",
    "Hanna",
    "Ivo",
    "Julia",
    "Kofi",
    "Lea",
    "Milan",
)
_LAST = (
    "Abel",
    "Bauer",
    "Costa",
    "Dahl",
    "Eriksen",
    "Fuchs",
    "Grant",
    "Haas",
    "Ivanova",
    "Jansen",
    "Kaya",
    "Lind",
)
_STREETS = ("Mill Lane", "Station Road", "Birch Street", "Harbour Way", "Church Hill", "Orchard Close")
_CITIES = ("Ashford", "Brixham", "Corby", "Dunham", "Elmstead", "Fairport")
ORDER_STATUSES = ("pending", "pending", "processed", "delivered", "delivered")
"""Of the orders of each customer."""

_USERS = 5


def draw_database(generator: np.random.Generator) -> Database:
    """Draw a shop. Every customer has an order of each status, and two that are pending and delivered."""
    products = _draw_products(generator)
    numbers = iter(_distinct(generator, _USERS * len(ORDER_STATUSES), 1_000_000, 9_999_999))
    users: dict[str, Any] = {}
    orders: dict[str, Any] = {}
    while len(users) < _USERS:
        first, last = _one(generator, _FIRST), _one(generator, _LAST)
        user_id = f"{first}_{last}_{_between(generator, 1000, 10_000)}".lower()
        if user_id in users or any(user["last_name"] == last for user in users.values()):
            continue
        card, gift_card = (f"{kind}_{_between(generator, 10_000, 100_000)}" for kind in ("card", "gift_card"))
        users[user_id] = {
            "first_name": first,
            "last_name": last,
            "email": f"{first}.{last}{_between(generator, 10, 100)}@example.com".lower(),
            "address": draw_address(generator),
            "payment_methods": {
                card: {"kind": "card"},
                gift_card: {"kind": "gift card", "balance": _between(generator, 100, 400)},
            },
            "orders": [],
        }
        for index in generator.permutation(len(ORDER_STATUSES)):
            order_id = f"#W{next(numbers)}"
            users[user_id]["orders"].append(order_id)
            orders[order_id] = _draw_order(
                generator, products, user_id, users[user_id], ORDER_STATUSES[int(index)]
            )
    return {"products": products, "users": users, "orders": orders}


def draw_address(generator: np.random.Generator) -> dict[str, str]:
    """Draw a random postal address."""
    return {
        "street": f"{_between(generator, 1, 200)} {_one(generator, _STREETS)}",
        "city": _one(generator, _CITIES),
        "zip": str(_between(generator, 10_000, 100_000)),
    }


def total_of(order: dict[str, Any]) -> int:
    """Return what an order's items cost together."""
    return sum(item["price"] for item in order["items"])


def described(item: dict[str, Any]) -> str:
    """Return an item as a customer speaks of it."""
    return f"{item['name']} ({', '.join(item['options'].values())})"


def _draw_products(generator: np.random.Generator) -> dict[str, Any]:
    products: dict[str, Any] = {}
    variants = sum(
        len(first) * len(second) for first, second in (each.values() for each in _PRODUCTS.values())
    )
    item_ids = iter(_distinct(generator, variants, 1_000_000, 9_999_999))
    product_ids = _distinct(generator, len(_PRODUCTS), 1_000_000, 9_999_999)
    for product_id, (name, options) in zip(product_ids, _PRODUCTS.items(), strict=True):
        base = _between(generator, 20, 120)
        (one, ones), (other, others) = options.items()
        products[str(product_id)] = {
            "name": name,
            "variants": {
                str(next(item_ids)): {
                    "options": {one: first, other: second},
                    "price": base + _between(generator, 0, 40),
                    "available": bool(generator.random() < 0.75),
                }
                for first in ones
                for second in others
            },
        }
    return products


def _draw_order(
    generator: np.random.Generator,
    products: dict[str, Any],
    user_id: str,
    user: dict[str, Any],
    status: str,
) -> dict[str, Any]:
    product_ids = list(products)
    chosen = [product_ids[int(each)] for each in generator.permutation(len(product_ids))]
    items = []
    for product_id in chosen[: _between(generator, 1, 4)]:
        product = products[product_id]
        item_id = _one(generator, list(product["variants"]))
        variant = product["variants"][item_id]
        items.append(
            {
                "item_id": item_id,
                "product_id": product_id,
                "name": product["name"],
                "options": dict(variant["options"]),
                "price": variant["price"],
            }
        )
    return {
        "user_id": user_id,
        "status": status,
        "items": items,
        "address": dict(user["address"]),
        "payment_method_id": _one(generator, list(user["payment_methods"])),
    }


def _distinct(generator: np.random.Generator, count: int, low: int, high: int) -> list[int]:
    found: dict[int, None] = {}
    while len(found) < count:
        found[_between(generator, low, high)] = None
    return list(found)


def _one(generator: np.random.Generator, choices: Sequence[str]) -> str:
    return choices[_between(generator, 0, len(choices))]


def _between(generator: np.random.Generator, low: int, high: int) -> int:
    """Draw a whole number below `high`; for small ranges, several times as fast as the generator's own way."""
    return low + int(generator.random() * (high - low))
