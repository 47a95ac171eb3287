"""Pages as text and as HTML. A page is a row of parts; each way of showing it writes the same parts."""

import html
import json
from collections.abc import Iterator
from typing import Literal, NamedTuple

from rollgym.envs.webshop.shop import Shop

SEPARATOR = " [SEP] "
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "'": "\\u0027"})
_AFTER_OPTIONS = """
attrs None category None query None product_category None Target asin options attrs price_upper instuction_text
category product_category query
"""


class Part(NamedTuple):
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


def page_parts(shop: Shop) -> list[Part]:
    """Return the parts of the page that is open, without empty ones."""
    parts = _done_page(shop) if shop.page == "done" else _open_page(shop)
    return [part for part in parts if part.text and part.text != "\n"]


def as_text(parts: list[Part]) -> str:
    """Return the parts on one line, with separators between."""
    return SEPARATOR.join(part.text.strip() for part in parts)


def as_quoted_text(parts: list[Part], instruction: str) -> str:
    """Return the parts behind the instruction on one line, each in quotation marks."""
    texts = [part.text for part in parts]
    behind = texts.index(instruction) + 1 if instruction in texts else 0
    return SEPARATOR.join(f"'{text.strip()}'" for text in texts[behind:])


def as_rich_text(parts: list[Part]) -> str:
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


def as_html(parts: list[Part], title: str) -> str:
    """Return the parts as an HTML page: buttons, links to products, and radio buttons for values.

    Args:
        parts: The page.
        title: The document's title.
    """
    body = "\n".join(map(_element, parts))
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title>'
    return f"<!DOCTYPE html>\n<html>\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n"


def _element(part: Part) -> str:
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


def _open_page(shop: Shop) -> Iterator[Part]:
    if shop.page == "index":
        yield from (Part("WebShop"), Part("Instruction: "), Part(shop.goal.instruction))
        yield Part("Search", "button")
        return
    yield from (Part("Instruction:"), Part(shop.goal.instruction), Part("Back to Search", "button"))
    if shop.page == "search_results":
        yield from _results(shop)
    elif shop.page == "item_page":
        yield Part("< Prev", "button")
        yield from _item(shop)
    else:
        yield Part("< Prev", "button")
        product = shop.product
        match shop.sub_page:
            case "description":
                yield Part(product.description)
            case "features":
                yield from (Part(f" {point}") for point in product.bullet_points)
            case "attributes":
                yield from (Part(attribute) for attribute in product.attributes)


def _results(shop: Shop) -> Iterator[Part]:
    yield Part(f"Page {shop.results_page} (Total results: {len(shop.results)})")
    if shop.results_page > 1:
        yield Part("< Prev", "button")
    yield Part("Next >", "button")
    for number in shop.shown:
        product = shop.catalogue.product(number)
        yield Part(product.asin, "product", number in shop.visited)
        yield from (Part(product.title), Part(product.price_tag))


def _item(shop: Shop) -> Iterator[Part]:
    product = shop.product
    url = shop.url
    for name, values in product.options.items():
        yield Part(name)
        # The original looks for a value in the address: one of an option's name, or of a quoted keyword, counts too.
        yield from (Part(value, "option", f'"{value}"' in url, name) for value in values)
    yield from (Part(product.title), Part(f"Price: {product.price_tag}"), Part("Rating: N.A."))
    yield from (Part(page.title(), "button") for page in shop.sub_pages())
    yield Part("Buy Now", "button")


def _done_page(shop: Shop) -> Iterator[Part]:
    """The page behind a purchase, with the blanks that the original leaves in it."""
    assert shop.score is not None
    yield from map(Part, ("Thank you for shopping with us!", "Your code: ", "None"))
    yield from map(Part, (" (Paste it in your MTurk interface.)", "Purchased", "asin", shop.product.asin))
    chosen = json.dumps(shop.options, sort_keys=True).translate(_ESCAPES)
    yield from map(Part, ("options", chosen, *(word.replace("_", " ") for word in _AFTER_OPTIONS.split())))
    yield from map(Part, ("Goal ", "None", "Reward", "Your score (min 0.0, max 1.0)"))
    yield from map(Part, (str(shop.score.total), "Reward Details ", "None"))
