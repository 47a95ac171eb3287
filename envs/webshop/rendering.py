"""Pages as text, as HTML, and in a few words for policies with little context; and how each framework words the shop.

A page is a row of parts; text and HTML write the same parts. Compact pages have a short code for every action, and
show only what the pages say: what is asked for, prices, options with those that the request names, and which words of
the request a product's texts lack.
"""

import html
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

from rollgym.envs.core.profiles import PROFILES, Profile
from rollgym.envs.webshop.catalogue import Catalogue
from rollgym.envs.webshop.expert import instruction_query
from rollgym.envs.webshop.goals import NO_LIMIT
from rollgym.envs.webshop.products import Product, search_text
from rollgym.envs.webshop.search import words_and_stems, words_of
from rollgym.envs.webshop.shop import BACK, BUY, NEXT, PREVIOUS, SUB_PAGES, Action, ShopVisit

SEPARATOR = " [SEP] "
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "'": "\\u0027"})
_AFTER_OPTIONS = """
attrs None category None query None product_category None Target asin options attrs price_upper instuction_text
category product_category query
"""


class PagePart(NamedTuple):
    """A piece of text on a page.

    Attributes:
        text: Its text.
        kind: Its kind.
        chosen: Whether it was clicked: a value that is chosen, or a product that was opened.
        group: For a value, the option that it belongs to.
    """

    text: str
    kind: Literal["text", "button", "product", "option"] = "text"
    chosen: bool = False
    group: str = ""


def page_parts(shop: ShopVisit) -> list[PagePart]:
    """Return the parts of the page that is open, without empty ones."""
    parts = _done_page(shop) if shop.page == "done" else _open_page(shop)
    return [part for part in parts if part.text and part.text != "\n"]


def as_text(parts: list[PagePart]) -> str:
    """Return the parts on one line, with separators between."""
    return SEPARATOR.join(part.text.strip() for part in parts)


def as_quoted_text(parts: list[PagePart], instruction: str) -> str:
    """Return the parts behind the instruction on one line, each in quotation marks."""
    texts = [part.text for part in parts]
    behind = texts.index(instruction) + 1 if instruction in texts else 0
    return SEPARATOR.join(f"'{text.strip()}'" for text in texts[behind:])


def as_rich_text(parts: list[PagePart]) -> str:
    """Return the parts on a line each, with marks around what can be clicked and what was."""
    lines = []
    for text, kind, chosen, _ in parts:
        if kind == "text":
            lines.append(text)
        else:
            before = {"button": "", "product": "\n", "option": "  "}[kind]
            mark = "clicked button" if chosen else "button"
            lines.append(f"{before}[{mark}] {text} [{mark}_]")
    clicked = [f"You have clicked {part.text}." for part in parts if part.kind == "option" and part.chosen]
    return "\n".join([*reversed(clicked), *lines, ""])


def as_html(parts: list[PagePart], title: str) -> str:
    """Return the parts as an HTML page: buttons, links to products, and radio buttons for values.

    Args:
        parts: The page.
        title: The document's title.
    """
    body = "\n".join(map(_element, parts))
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title>'
    return f"<!DOCTYPE html>\n<html>\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n"


def _element(part: PagePart) -> str:
    text = html.escape(part.text)
    match part.kind:
        case "button":
            return f'<button class="btn">{text}</button>'
        case "product":
            mark = ' data-visited="true"' if part.chosen else ""
            return f'<h4><a class="product-link"{mark}>{text}</a></h4>'
        case "option":
            checked = " checked" if part.chosen else ""
            name = html.escape(part.group)
            return f'<label><input type="radio" name="{name}" value="{text}"{checked}>{text}</label>'
        case "text":
            return f"<p>{text}</p>"


def _open_page(shop: ShopVisit) -> Iterator[PagePart]:
    if shop.page == "index":
        yield from (PagePart("WebShop"), PagePart("Instruction: "), PagePart(shop.goal.instruction))
        yield PagePart("Search", "button")
        return
    yield from (
        PagePart("Instruction:"),
        PagePart(shop.goal.instruction),
        PagePart("Back to Search", "button"),
    )
    if shop.page == "search_results":
        yield from _results(shop)
    elif shop.page == "item_page":
        yield PagePart("< Prev", "button")
        yield from _item(shop)
    else:
        yield PagePart("< Prev", "button")
        product = shop.product
        match shop.sub_page:
            case "description":
                yield PagePart(product.description)
            case "features":
                yield from (PagePart(f" {point}") for point in product.bullet_points)
            case "attributes":
                yield from (PagePart(attribute) for attribute in product.attributes)


def _results(shop: ShopVisit) -> Iterator[PagePart]:
    yield PagePart(f"Page {shop.results_page} (Total results: {len(shop.results)})")
    if shop.results_page > 1:
        yield PagePart("< Prev", "button")
    yield PagePart("Next >", "button")
    for number in shop.shown:
        product = shop.catalogue.product(number)
        yield PagePart(product.asin, "product", number in shop.visited)
        yield from (PagePart(product.title), PagePart(product.price_tag))


def _item(shop: ShopVisit) -> Iterator[PagePart]:
    product = shop.product
    url = shop.url
    for name, values in product.options.items():
        yield PagePart(name)
        # The original looks for a value in the address: one of an option's name, or of a quoted keyword, counts too.
        yield from (PagePart(value, "option", f'"{value}"' in url, name) for value in values)
    yield from (PagePart(product.title), PagePart(f"Price: {product.price_tag}"), PagePart("Rating: N.A."))
    yield from (PagePart(page.title(), "button") for page in shop.sub_pages())
    yield PagePart("Buy Now", "button")


def _done_page(shop: ShopVisit) -> Iterator[PagePart]:
    """The page behind a purchase, with the blanks that the original leaves in it."""
    assert shop.score is not None
    yield from map(PagePart, ("Thank you for shopping with us!", "Your code: ", "None"))
    yield from map(PagePart, (" (Paste it in your MTurk interface.)", "Purchased", "asin", shop.product.asin))
    chosen = json.dumps(shop.options, sort_keys=True).translate(_ESCAPES)
    yield from map(
        PagePart, ("options", chosen, *(word.replace("_", " ") for word in _AFTER_OPTIONS.split()))
    )
    yield from map(PagePart, ("Goal ", "None", "Reward", "Your score (min 0.0, max 1.0)"))
    yield from map(PagePart, (str(shop.score.total), "Reward Details ", "None"))


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


def codes(shop: ShopVisit) -> Mapping[str, Action]:
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


def as_compact_text(shop: ShopVisit) -> str:
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


def _wanted(shop: ShopVisit) -> str:
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


def _result(shop: ShopVisit, index: int, number: int) -> str:
    has = _stems(shop.catalogue, number)
    lacking = [
        f" -{word}" for word, stem in _request(shop.catalogue, instruction_query(shop)) if stem not in has
    ]
    opened = "*" if number in shop.visited else ""
    price = _price(shop, shop.catalogue.product(number))
    return f"{index}{opened} {price}{''.join(lacking[:_MOST_LACKING])}"


def _price(shop: ShopVisit, product: Product) -> str:
    text = " to ".join(f"{price:.0f}" for price in product.pricing)
    return f"{text}!" if product.pricing[0] > shop.goal.price_upper else text


def _options(shop: ShopVisit) -> list[str]:
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


@dataclass(frozen=True, slots=True)
class Wording:
    """How one framework talks with the shop.

    Attributes:
        reading: The action's place in a reply.
        template: The observation, with `{page}`, `{task}`, `{actions}` and `{left}` (steps that are left).
        penalty: Added to the reward of a turn whose action cannot be read or is not possible.
        pays: The shop's reward as it is, or something only for a perfect purchase.
        perfect: The reward of a perfect purchase in the second case.
        search_anywhere: Whether a search is possible on pages without a search bar, as the shop itself allows.
        hides_lonely_next: Whether `next >` is left out if only it and `back to search` can be clicked.
        quoted: Whether the parts of a text page stand in quotation marks, without the instruction.
        lower_case: Whether replies are read in lower case.
        refuses_chinese: Whether a reply with Chinese characters is not valid.
    """

    reading: Profile
    template: str = "{page}"
    penalty: float = 0.0
    pays: Literal["score", "perfect"] = "score"
    perfect: float = 1.0
    search_anywhere: bool = True
    hides_lonely_next: bool = False
    quoted: bool = False
    lower_case: bool = False
    refuses_chinese: bool = False


WORDINGS: Mapping[str, Wording] = MappingProxyType(
    {
        "native": Wording(PROFILES["native"]),
        "compact": Wording(replace(PROFILES["native"], name="compact"), search_anywhere=False),
        "ragen": Wording(
            PROFILES["ragen"],
            template="{page}\nCompare products and check their options before you buy. You have {left} actions left. "
            "You must choose from these actions: {actions}.",
            penalty=-0.1,
            pays="perfect",
            search_anywhere=False,
            hides_lonely_next=True,
        ),
        "roll": Wording(
            PROFILES["roll"],
            template="{page}\nAvailable actions: {actions}.\nActions left: {left}.",
            penalty=-0.05,
            search_anywhere=False,
        ),
        "verl-agent": Wording(
            PROFILES["verl-agent"],
            template="Your task is to: {task}.\nCurrent observation: {page}\nAdmissible actions: {actions}.",
            penalty=-0.1,
            pays="perfect",
            perfect=10.0,
            search_anywhere=False,
            quoted=True,
            lower_case=True,
            refuses_chinese=True,
        ),
        "gem": Wording(
            PROFILES["gem"],
            template="{page}\nAnswer with \\boxed{{ACTION}}. Available actions: {actions}.",
            penalty=-0.1,
        ),
    }
)


def wording_named(name: str) -> Wording:
    """Return a wording.

    Raises:
        ValueError: The name is unknown.
    """
    if name not in WORDINGS:
        raise ValueError(f"profile must be one of {', '.join(WORDINGS)}, not {name!r}")
    return WORDINGS[name]
