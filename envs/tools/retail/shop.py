"""The shop: its database, generated for every episode, and the tools of its staff, which are bound to its rules.

Products with variants, customers and orders are plain JSON throughout.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from rollgym.envs.tools.tool import Tool, ToolError, tool_parameters

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


CANCEL_REASONS = ("no longer needed", "ordered by mistake")
WRITES = frozenset(
    {
        "cancel_order",
        "change_order_address",
        "change_order_items",
        "change_user_address",
        "return_items",
        "exchange_items",
    }
)
"""The tools that change the database."""

_TEXT = {"type": "string"}
_ORDER = {"type": "string", "description": "Such as #W1234567"}
_ITEMS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_ADDRESS = {"street": _TEXT, "city": _TEXT, "zip": _TEXT}


class Shop:
    """A database and the tools on it."""

    def __init__(self) -> None:
        self.open({"products": {}, "users": {}, "orders": {}})

    def open(self, database: Database) -> None:
        """Work on this database from now on."""
        self.database = database
        self._digest: str | None = None

    @property
    def digest(self) -> str:
        """A name of the database's state: equal states have equal names."""
        if self._digest is None:
            content = orjson.dumps(self.database, option=orjson.OPT_SORT_KEYS)
            self._digest = hashlib.blake2b(content, digest_size=12).hexdigest()
        return self._digest

    def tools(self) -> tuple[Tool, ...]:
        """Return all tools; those that find and read first."""
        change = tool_parameters(
            ["order_id", "item_ids", "new_item_ids", "payment_method_id"],
            order_id=_ORDER,
            item_ids=_ITEMS,
            new_item_ids={**_ITEMS, "description": "In the order of item_ids, each of the same product"},
            payment_method_id={"type": "string", "description": "Pays or receives the difference in price"},
        )
        return (
            Tool(
                "find_user_by_email",
                "Return the user id of an e-mail address.",
                tool_parameters(["email"], email=_TEXT),
                self._find_by_email,
            ),
            Tool(
                "find_user_by_name_and_zip",
                "Return the user id of a name and a zip code.",
                tool_parameters(
                    ["first_name", "last_name", "zip"], first_name=_TEXT, last_name=_TEXT, zip=_TEXT
                ),
                self._find_by_name,
            ),
            Tool(
                "get_user",
                "Return a user's address, payment methods and order ids.",
                tool_parameters(["user_id"], user_id=_TEXT),
                self._user,
            ),
            Tool(
                "get_order",
                "Return an order's status, items, address and payment method.",
                tool_parameters(["order_id"], order_id=_ORDER),
                self._order,
            ),
            Tool(
                "list_products",
                "Return the names and ids of all products.",
                tool_parameters(),
                self._products,
            ),
            Tool(
                "get_product",
                "Return a product's variants with their item ids, options, prices and availability.",
                tool_parameters(["product_id"], product_id=_TEXT),
                self._product,
            ),
            Tool(
                "cancel_order",
                "Cancel a pending order.",
                tool_parameters(
                    ["order_id", "reason"], order_id=_ORDER, reason={"enum": list(CANCEL_REASONS)}
                ),
                self._cancel,
            ),
            Tool(
                "change_order_address",
                "Change where a pending order is sent to.",
                tool_parameters(["order_id", *_ADDRESS], order_id=_ORDER, **_ADDRESS),
                self._change_order_address,
            ),
            Tool(
                "change_order_items",
                "Exchange items of a pending order for other variants; once for each order.",
                change,
                self._change_items,
            ),
            Tool(
                "change_user_address",
                "Change the address that a user's new orders are sent to.",
                tool_parameters(["user_id", *_ADDRESS], user_id=_TEXT, **_ADDRESS),
                self._change_user_address,
            ),
            Tool(
                "return_items",
                "Return items of a delivered order; the refund goes to the payment method.",
                tool_parameters(
                    ["order_id", "item_ids", "payment_method_id"],
                    order_id=_ORDER,
                    item_ids=_ITEMS,
                    payment_method_id=_TEXT,
                ),
                self._return,
            ),
            Tool(
                "exchange_items",
                "Exchange items of a delivered order for other variants.",
                change,
                self._exchange,
            ),
        )

    # -- finding and reading ---------------------------------------------------------------------------------------

    def _find_by_email(self, email: str) -> str:
        return self._find(lambda user: user["email"] == email.strip().lower())

    def _find_by_name(self, first_name: str, last_name: str, zip: str) -> str:
        wanted = (first_name.strip().lower(), last_name.strip().lower(), zip.strip())
        return self._find(
            lambda user: (
                (user["first_name"].lower(), user["last_name"].lower(), user["address"]["zip"]) == wanted
            )
        )

    def _find(self, fits: Any) -> str:
        for user_id, user in self.database["users"].items():
            if fits(user):
                return str(user_id)
        raise ToolError("there is no such user")

    def _user(self, user_id: str) -> Mapping[str, Any]:
        return self._get("users", user_id, "user")

    def _order(self, order_id: str) -> Mapping[str, Any]:
        order = self._get("orders", order_id, "order")
        return {**order, "total": total_of(order)}

    def _products(self) -> Mapping[str, str]:
        return {product["name"]: key for key, product in self.database["products"].items()}

    def _product(self, product_id: str) -> Mapping[str, Any]:
        return self._get("products", product_id, "product")

    def _get(self, table: str, key: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] | None = self.database[table].get(key.strip())
        if found is None:
            raise ToolError(f"there is no {name} {key[:60]!r}")
        return found

    # -- changing --------------------------------------------------------------------------------------------------

    def _cancel(self, order_id: str, reason: str) -> str:
        order = self._order_that_is("pending", order_id)
        self._pay(order, order["payment_method_id"], -total_of(order))
        order.update(status="cancelled", cancel_reason=reason)
        return self._changed(f"order {order_id} is cancelled, {total_of(order)} dollars are paid back")

    def _change_order_address(self, order_id: str, street: str, city: str, zip: str) -> str:
        order = self._order_that_is("pending", order_id)
        order["address"] = {"street": street, "city": city, "zip": zip}
        return self._changed(f"order {order_id} goes to the new address")

    def _change_user_address(self, user_id: str, street: str, city: str, zip: str) -> str:
        user = self._get("users", user_id, "user")
        user["address"] = {"street": street, "city": city, "zip": zip}
        return self._changed("the address is changed")

    def _change_items(
        self, order_id: str, item_ids: Sequence[str], new_item_ids: Sequence[str], payment_method_id: str
    ) -> str:
        order = self._order_that_is("pending", order_id)
        if order.get("items_changed"):
            raise ToolError("the items of this order were changed already, which is possible once")
        news = self._other_variants(order, item_ids, new_item_ids)
        difference = self._difference(order, news)
        self._pay(order, payment_method_id, difference)
        order["items"] = [news.get(item["item_id"], item) for item in order["items"]]
        order["items_changed"] = True
        return self._changed(f"the items are changed, the difference is {difference} dollars")

    def _return(self, order_id: str, item_ids: Sequence[str], payment_method_id: str) -> str:
        order = self._order_that_is("delivered", order_id)
        items = self._items_of(order, item_ids)
        user = self.database["users"][order["user_id"]]
        method = self._payment_method(order, payment_method_id)
        if payment_method_id != order["payment_method_id"] and method["kind"] != "gift card":
            raise ToolError("a refund goes to the payment method of the order or to a gift card")
        refund = sum(item["price"] for item in items)
        order.update(
            status="return requested",
            returned={"item_ids": sorted(item_ids), "payment_method_id": payment_method_id, "refund": refund},
        )
        assert payment_method_id in user["payment_methods"]
        return self._changed(f"the return is requested, {refund} dollars will be paid to {payment_method_id}")

    def _exchange(
        self, order_id: str, item_ids: Sequence[str], new_item_ids: Sequence[str], payment_method_id: str
    ) -> str:
        order = self._order_that_is("delivered", order_id)
        news = self._other_variants(order, item_ids, new_item_ids)
        difference = self._difference(order, news)
        self._pay(order, payment_method_id, difference)
        pairs = sorted(zip(item_ids, new_item_ids, strict=True))
        order.update(
            status="exchange requested",
            exchanged={"items": [list(pair) for pair in pairs], "payment_method_id": payment_method_id},
        )
        return self._changed(f"the exchange is requested, the difference is {difference} dollars")

    # -- rules -----------------------------------------------------------------------------------------------------

    def _order_that_is(self, status: str, order_id: str) -> dict[str, Any]:
        order = self._get("orders", order_id, "order")
        if order["status"] != status:
            raise ToolError(f"the order is {order['status']}, and this is for orders that are {status}")
        return order

    def _items_of(self, order: Mapping[str, Any], item_ids: Sequence[str]) -> list[dict[str, Any]]:
        by_id = {item["item_id"]: item for item in order["items"]}
        if len(set(item_ids)) < len(item_ids):
            raise ToolError("an item is named twice")
        for item_id in item_ids:
            if item_id not in by_id:
                raise ToolError(f"the order has no item {item_id[:40]!r}")
        return [by_id[item_id] for item_id in item_ids]

    def _other_variants(
        self, order: Mapping[str, Any], item_ids: Sequence[str], new_item_ids: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        """Return the new items by the ids of the old ones."""
        if len(item_ids) != len(new_item_ids):
            raise ToolError("each item needs one new item")
        news = {}
        for item, new_id in zip(self._items_of(order, item_ids), new_item_ids, strict=True):
            variant = self.database["products"][item["product_id"]]["variants"].get(new_id)
            if variant is None:
                raise ToolError(f"{new_id[:40]!r} is no variant of the {item['name']}")
            if new_id == item["item_id"]:
                raise ToolError("an item cannot be exchanged for itself")
            if not variant["available"]:
                raise ToolError(f"the variant {new_id} is not available")
            news[item["item_id"]] = {
                **item,
                "item_id": new_id,
                "options": dict(variant["options"]),
                "price": variant["price"],
            }
        return news

    def _difference(self, order: Mapping[str, Any], news: Mapping[str, Mapping[str, Any]]) -> int:
        olds = {item["item_id"]: item["price"] for item in order["items"]}
        return sum(int(new["price"]) - int(olds[old]) for old, new in news.items())

    def _payment_method(self, order: Mapping[str, Any], payment_method_id: str) -> dict[str, Any]:
        methods = self.database["users"][order["user_id"]]["payment_methods"]
        if payment_method_id not in methods:
            raise ToolError(f"the customer has no payment method {payment_method_id[:40]!r}")
        method: dict[str, Any] = methods[payment_method_id]
        return method

    def _pay(self, order: Mapping[str, Any], payment_method_id: str, amount: int) -> None:
        """Charge an amount, or refund it if it is negative; what a card pays is booked elsewhere."""
        method = self._payment_method(order, payment_method_id)
        if method["kind"] == "gift card":
            if method["balance"] < amount:
                raise ToolError(f"the gift card holds {method['balance']} dollars, and {amount} are needed")
            method["balance"] -= amount

    def _changed(self, text: str) -> str:
        self._digest = None
        return text
