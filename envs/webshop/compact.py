"""Pages in a few words, with a short code for everything that can be done: for policies with little context.

Nothing is shown but what the pages say: what is asked for, prices, options with those that the request names, and which
words of the request a product's texts lack.
"""

from collections.abc import Mapping
from functools import lru_cache

from rollgym.envs.webshop.catalogue import Catalogue
from rollgym.envs.webshop.expert import instruction_query
from rollgym.envs.webshop.goals import NO_LIMIT
from rollgym.envs.webshop.products import Product, search_text
from rollgym.envs.webshop.shop import BACK, BUY, NEXT, PREVIOUS, SUB_PAGES, Action, Shop
from rollgym.envs.webshop.words import words_and_stems, words_of

_MOST_VALUES = 24
_LONGEST_VALUE = 14
_MOST_LACKING = 4
_BUTTONS = {BACK: "b", NEXT: "n", PREVIOUS: "p", BUY: "$", **{page: page[0] for page in SUB_PAGES}}
RULES = (
    "You are in a web shop and buy what is asked for. The first line says what. Type s to search for it. Results are "
    "numbered: each line has a price (! if it is too high) and what of the request is missing after a minus. "
    "Type a number to open a product or to choose an option (+ marks what the request names, * what is chosen; the "
    "last line has what is named and not chosen yet), n and p for the next and the previous page, b to go back to the "
    "start, $ to buy."
)


def codes(shop: Shop) -> Mapping[str, Action]:
    """Return what can be done by its code, in the order of the page."""
    if shop.page == "index":
        query = instruction_query(shop)
        return {"s": Action("search", query)} if query else {}
    found: dict[str, Action] = {}
    numbered = 0
    for text, clickable in shop.clickables().items():
        if clickable.kind == "button":
            found[_BUTTONS[text]] = Action("click", text)
        elif numbered < _MOST_VALUES:
            found[str(numbered)] = Action("click", text)
            numbered += 1
    return found


def as_compact_text(shop: Shop) -> str:
    """Return the page in a few words."""
    lines = [_wanted(shop)]
    match shop.page:
        case "search_results":
            lines.append(f"page {shop.results_page}")
            lines += [_result(shop, index, number) for index, number in enumerate(shop.shown)]
        case "item_page":
            lines.append(f"item {_price(shop, shop.product)}")
            lines += _options(shop)
        case "item_sub_page":
            lines.append(shop.sub_page)
        case "done":
            lines.append("bought")
        case "index":
            lines.append("s")
    return "\n".join(lines)


def _wanted(shop: Shop) -> str:
    limit = "" if shop.goal.price_upper == NO_LIMIT else f" max {shop.goal.price_upper:.0f}"
    return " ".join(word for word, _ in _request(shop.catalogue, instruction_query(shop))) + limit


@lru_cache(maxsize=4096)
def _request(catalogue: Catalogue, query: str) -> tuple[tuple[str, str], ...]:
    """Return the words of a request that occur in the shop at all, with their stems, each once."""
    return tuple(
        {stem: (word, stem) for word, stem in words_and_stems(query) if catalogue.index.knows(stem)}.values()
    )


@lru_cache(maxsize=4096)
def _stems(catalogue: Catalogue, number: int) -> frozenset[str]:
    return frozenset(words_of(search_text(catalogue.product(number))))


def _result(shop: Shop, index: int, number: int) -> str:
    has = _stems(shop.catalogue, number)
    lacking = [
        f" -{word}" for word, stem in _request(shop.catalogue, instruction_query(shop)) if stem not in has
    ]
    opened = "*" if number in shop.visited else ""
    price = _price(shop, shop.catalogue.product(number))
    return f"{index}{opened} {price}{''.join(lacking[:_MOST_LACKING])}"


def _price(shop: Shop, product: Product) -> str:
    text = " to ".join(f"{price:.0f}" for price in product.pricing)
    return f"{text}!" if product.pricing[0] > shop.goal.price_upper else text


def _options(shop: Shop) -> list[str]:
    numbers = {action.argument: code for code, action in codes(shop).items() if code.isdigit()}
    named = {stem for _, stem in _request(shop.catalogue, instruction_query(shop))}
    lines = []
    # Repeated at the end, so that a small policy finds them without counting: options named and not chosen yet.
    missing = []
    for name, values in shop.product.options.items():
        shown = []
        for value in values:
            if value in numbers:
                mark = (
                    "*"
                    if shop.options.get(name) == value
                    else "+"
                    if named.issuperset(words_of(value))
                    else ""
                )
                shown.append(f" {mark}{numbers[value]} {value[:_LONGEST_VALUE]}")
                if mark == "+" and name not in shop.options:
                    missing.append(numbers[value])
        lines.append(f"{name[:_LONGEST_VALUE]}{''.join(shown)}")
    return [*lines, f"named {' '.join(missing)}"] if missing else lines
