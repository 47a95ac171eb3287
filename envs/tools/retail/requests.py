"""Requests of customers: drawn from the database, with the calls that fulfil them, and the customer who makes them.

The customer is a script that matches words, answers questions, and ends the conversation.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.envs.tools.retail.shop import (
    CANCEL_REASONS,
    ORDER_STATUSES,
    Database,
    described,
    draw_address,
    total_of,
)


@dataclass(frozen=True, slots=True)
class CustomerRequest:
    """One thing that a customer wants.

    Attributes:
        kind: The generator that made it.
        opening: The customer's words for it.
        details: The customer's answers, by topic: `order`, `reason`, `item`, `variant`, `address` and
            `payment`.
        reads: Calls that an agent needs to know what to do.
        write: The call that does it; None if nothing is to be changed.
        plan: An agent's announcement of the change.
        told: Texts that a reply to the customer must contain.
        asks: Details that an agent has to ask for.
    """

    kind: str
    opening: str
    details: Mapping[str, str]
    reads: tuple[ToolCall, ...]
    write: ToolCall | None
    plan: str
    told: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()


def draw_request(
    generator: np.random.Generator, database: Database, order_id: str, kind: str
) -> CustomerRequest | None:
    """Draw a request about an order; None if the order does not suit a request of that kind.

    Args:
        generator: Draws.
        database: The shop's.
        order_id: The order.
        kind: Kind of the request.
    """
    order = database["orders"][order_id]
    if order["status"] not in _STATUSES[kind]:
        return None
    vague = bool(generator.random() < 0.4)
    meant = "one of my orders" if vague else f"my order {order_id}"
    request = _KINDS[kind](generator, database, order_id, order, meant)
    if request is None:
        return None
    return replace(request, asks=(*(("order",) if vague else ()), *request.asks))


def usable_orders(kinds: Sequence[str]) -> int:
    """Return how many orders of each customer requests of these kinds can be about."""
    statuses = {status for kind in kinds for status in _STATUSES[kind]}
    return sum(status in statuses for status in ORDER_STATUSES)


def _cancel(
    generator: np.random.Generator, database: Database, order_id: str, order: dict[str, Any], meant: str
) -> CustomerRequest:
    reason = CANCEL_REASONS[int(generator.integers(len(CANCEL_REASONS)))]
    said = {"no longer needed": "I no longer need it.", "ordered by mistake": "I ordered it by mistake."}[
        reason
    ]
    return CustomerRequest(
        "cancel",
        f"I would like to cancel {meant}.",
        {"order": _order_detail(order_id, order), "reason": said, "payment": "The way I paid."},
        (_read_order(order_id),),
        ToolCall("cancel_order", {"order_id": order_id, "reason": reason}),
        f"cancel order {order_id} ({reason})",
        asks=("reason",),
    )


def _refused(
    generator: np.random.Generator, database: Database, order_id: str, order: dict[str, Any], meant: str
) -> CustomerRequest:
    return CustomerRequest(
        "refused",
        f"I would like to cancel {meant}.",
        {
            "order": _order_detail(order_id, order),
            "reason": "I no longer need it.",
            "payment": "The way I paid.",
        },
        (_read_order(order_id),),
        None,
        f"cancel order {order_id}",
    )


def _return(
    generator: np.random.Generator, database: Database, order_id: str, order: dict[str, Any], meant: str
) -> CustomerRequest:
    items = order["items"]
    chosen = [items[int(each)] for each in generator.permutation(len(items))[: int(generator.integers(1, 3))]]
    methods = database["users"][order["user_id"]]["payment_methods"]
    gift_card = next(key for key, method in methods.items() if method["kind"] == "gift card")
    to_card = bool(generator.random() < 0.5)
    method_id = gift_card if to_card else order["payment_method_id"]
    refund = str(sum(item["price"] for item in chosen))
    named = " and the ".join(described(item) for item in chosen)
    payment = "Please put the money on my gift card." if to_card else "Please refund the way I paid."
    asks = bool(generator.random() < 0.5)
    return CustomerRequest(
        "return",
        f"I want to return the {named} from {meant}. {payment}"
        + (" And please tell me how many dollars I get back." if asks else ""),
        {
            "order": _order_detail(order_id, order),
            "item": f"The {named}.",
            "payment": payment,
            "reason": "I do not like it.",
        },
        (_read_order(order_id), ToolCall("get_user", {"user_id": order["user_id"]})),
        ToolCall(
            "return_items",
            {
                "order_id": order_id,
                "item_ids": [item["item_id"] for item in chosen],
                "payment_method_id": method_id,
            },
        ),
        f"return the {named} of order {order_id}; {refund} dollars go to {method_id}",
        (refund,) if asks else (),
    )


def _other_variant(
    generator: np.random.Generator, database: Database, order_id: str, order: dict[str, Any], meant: str
) -> CustomerRequest | None:
    user = database["users"][order["user_id"]]
    card = next(key for key, method in user["payment_methods"].items() if method["kind"] == "card")
    for index in generator.permutation(len(order["items"])):
        item = order["items"][int(index)]
        variants = database["products"][item["product_id"]]["variants"]
        # One option differs, so that the customer's wish means one variant.
        fitting = [
            (item_id, variant["options"])
            for item_id, variant in variants.items()
            if variant["available"] and len(_differing(variant["options"], item["options"])) == 1
        ]
        if not fitting:
            continue
        new_id, options = fitting[int(generator.integers(len(fitting)))]
        (option,) = _differing(options, item["options"])
        delivered = order["status"] == "delivered"
        wish = f"the same with {option} {options[option]}"
        arguments = {
            "order_id": order_id,
            "item_ids": [item["item_id"]],
            "new_item_ids": [new_id],
            "payment_method_id": card,
        }
        return CustomerRequest(
            "exchange" if delivered else "change_items",
            f"I would like to have the {described(item)} of {meant} in another variant: "
            f"{wish}. The difference in price goes by my card.",
            {
                "order": _order_detail(order_id, order),
                "item": f"The {described(item)}.",
                "variant": f"I want {wish}.",
                "payment": "By my card.",
                "reason": "I changed my mind.",
            },
            (
                _read_order(order_id),
                ToolCall("get_user", {"user_id": order["user_id"]}),
                ToolCall("get_product", {"product_id": item["product_id"]}),
            ),
            ToolCall("exchange_items" if delivered else "change_order_items", arguments),
            f"exchange the {described(item)} of order {order_id} for {wish}, with the difference on {card}",
        )
    return None


def _address(
    generator: np.random.Generator, database: Database, order_id: str, order: dict[str, Any], meant: str
) -> CustomerRequest:
    address = draw_address(generator)
    said = f"{address['street']}, {address['city']}, zip code {address['zip']}"
    return CustomerRequest(
        "address",
        f"Please send {meant} to another address, {said}. My own address stays as it is.",
        {
            "order": _order_detail(order_id, order),
            "address": f"The new address is {said}.",
            "reason": "I am away.",
        },
        (_read_order(order_id),),
        ToolCall("change_order_address", {"order_id": order_id, **address}),
        f"send order {order_id} to {said}",
    )


def _total(
    generator: np.random.Generator, database: Database, order_id: str, order: dict[str, Any], meant: str
) -> CustomerRequest:
    return CustomerRequest(
        "total",
        f"How many dollars did {meant} cost me in total?",
        {"order": _order_detail(order_id, order)},
        (_read_order(order_id),),
        None,
        f"look up the total of order {order_id}",
        (str(total_of(order)),),
    )


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [name for name in one if one[name] != other[name]]


def _read_order(order_id: str) -> ToolCall:
    return ToolCall("get_order", {"order_id": order_id})


def _order_detail(order_id: str, order: Mapping[str, Any]) -> str:
    return f"It is order {order_id}, the one with the {described(order['items'][0])}."


_KINDS: Mapping[str, Callable[..., CustomerRequest | None]] = MappingProxyType(
    {
        "cancel": _cancel,
        "return": _return,
        "exchange": _other_variant,
        "change_items": _other_variant,
        "address": _address,
        "total": _total,
        "refused": _refused,
    }
)
REQUEST_KINDS = tuple(_KINDS)
_STATUSES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cancel": ("pending",),
        "return": ("delivered",),
        "exchange": ("delivered",),
        "change_items": ("pending",),
        "address": ("pending",),
        "total": ("pending", "processed", "delivered"),
        "refused": ("processed", "delivered"),
    }
)

STOP = "###STOP###"
"""The end of the customer's last message."""

MOST_HEARD = 4_000
"""Characters of a message that the customer listens to."""

_PATIENCE = 4
_IDENTITY = re.compile(r"e-?mail|\bname\b|zip|identif|verif|who (?:am i|are you)|authenticat", re.IGNORECASE)
_CONFIRMATION = re.compile(
    r"\bconfirm|yes ?/ ?no|\(yes|shall i|should i|may i|(?:do|would) you (?:want|like) me to|go ahead|proceed"
    r"|(?:is|are) (?:that|this|these) (?:correct|right|ok|okay)|do you agree",
    re.IGNORECASE,
)
_ANYTHING_ELSE = re.compile(r"anything else|something else|any other|further help", re.IGNORECASE)
_REPORT = re.compile(
    r"\b(?:has|have|is|are|was|were) (?:now |been |successfully )*"
    r"(?:done|cancell?ed|returned|exchanged|updated|changed|requested|redirected)\b"
    r"|\btotal (?:is|was|of)|\bcosts?\b|cannot|can't|can not|unable|not possible|not able",
    re.IGNORECASE,
)
_ASKED = {
    "order": re.compile(
        r"which order|order (?:number|id)|what order|number of (?:the|your) order", re.IGNORECASE
    ),
    "reason": re.compile(r"reason|\bwhy\b", re.IGNORECASE),
    "item": re.compile(r"(?:which|what) (?:items?|products?|articles?)", re.IGNORECASE),
    "variant": re.compile(r"variant|option|colou?r|size|which one", re.IGNORECASE),
    "address": re.compile(r"address|street|where (?:to|should)", re.IGNORECASE),
    "payment": re.compile(r"payment|refund|gift card|\bcard\b|pay\b|method", re.IGNORECASE),
}


@dataclass(frozen=True, slots=True)
class Identity:
    """How a customer says who it is: by address, or by name and zip code."""

    text: str


class Customer:
    """One customer in one conversation.

    Args:
        identity: The reply to a question about its identity.
        requests: Its requests, one after another.
    """

    def __init__(self, identity: Identity, requests: Sequence[CustomerRequest]) -> None:
        self._identity = identity
        self._requests = tuple(requests)
        self._patience = _PATIENCE
        self.position = 0
        self.identified = False
        self.agreed = False
        self.told: set[str] = set()
        self.gone = False

    @property
    def request(self) -> CustomerRequest | None:
        """Return the present request; None once everything was reported on."""
        return self._requests[self.position] if self.position < len(self._requests) else None

    def opening(self) -> str:
        """Return the customer's first message."""
        return f"Hello. {self._requests[0].opening}"

    def answer(self, message: str) -> str:
        """Return what it says to a message of the agent's."""
        request = self.request
        assert request is not None
        message = message[:MOST_HEARD]
        if not self.identified and _IDENTITY.search(message):
            self.identified = True
            return self._identity.text
        if _CONFIRMATION.search(message) and not _ANYTHING_ELSE.search(message):
            self.agreed = True
            return "Yes, please go ahead."
        # A question other than an offer of more help is not a report.
        asks = "?" in message
        if _ANYTHING_ELSE.search(message) or (not asks and _REPORT.search(message)):
            return self._next()
        asked = [name for name, words in _ASKED.items() if name in request.details and words.search(message)]
        if asked:
            self.told.update(asked)
            return " ".join(request.details[name] for name in asked)
        if _IDENTITY.search(message):
            return self._identity.text
        self._patience -= 1
        if self._patience <= 0:
            self.gone = True
            return f"This leads nowhere. {STOP}"
        return request.opening

    def _next(self) -> str:
        self.position += 1
        self.agreed = False
        self.told = set()
        request = self.request
        if request is None:
            self.gone = True
            return f"That is all, thank you. {STOP}"
        return f"Thank you. {request.opening}"
