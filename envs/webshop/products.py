"""A product as the shop knows it, made from a record of WebShop's raw schema."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_LONGEST_ASIN = 10
_NOT_IN_NUMBERS = re.compile(r"[^\d.]")
_NO_PRICE = 100.0
_NO_ATTRIBUTES = ("DUMMY_ATTR",)


@dataclass(frozen=True, slots=True)
class Product:
    """One product.

    Attributes:
        asin: Its id.
        title: Its name.
        description: A paragraph about it.
        bullet_points: Its features.
        pricing: One price, or the lowest and the highest of several.
        options: Values to choose from by the option's name, all in lower case.
        attributes: Its properties, in short phrases.
        query: The search that it was found with when the data were collected.
        category: Its department.
        product_category: Its place in the shop's tree, levels separated by a chevron.
        image: Address of its picture.
        instruction: A customer's request for this product, without options and price; None if it is not a goal.
        instruction_attributes: The attributes that the instruction names.
    """

    asin: str
    title: str
    description: str
    bullet_points: tuple[str, ...]
    pricing: tuple[float, ...]
    options: Mapping[str, tuple[str, ...]]
    attributes: tuple[str, ...]
    query: str
    category: str
    product_category: str
    image: str
    instruction: str | None
    instruction_attributes: tuple[str, ...]

    @property
    def price_tag(self) -> str:
        """The price as it is shown."""
        return " to ".join(f"${price}" for price in self.pricing)


def read_products(
    records: Iterable[Mapping[str, Any]], attributes: Mapping[str, Mapping[str, Any]]
) -> Iterator[Product]:
    """Yield the products of raw records; records whose ids are missing, too long or repeated are left out.

    Args:
        records: Raw records, in the order of their file.
        attributes: By id, `attributes`, and, if present, `instruction` with its `instruction_attributes`.
    """
    seen: set[str] = set()
    for record in records:
        asin = str(record["asin"])
        if asin == "nan" or len(asin) > _LONGEST_ASIN or asin in seen:
            continue
        seen.add(asin)
        yield _read_product(asin, record, attributes.get(asin, {}))


def search_text(product: Product) -> str:
    """Return what the search engine reads of a product: title, description, first feature and options."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    first = product.bullet_points[0] if product.bullet_points else ""
    return f"{product.title} {product.description} {first} {options}".lower()


def _read_product(asin: str, record: Mapping[str, Any], facts: Mapping[str, Any]) -> Product:
    points = record["small_description"]
    images = record.get("images") or [""]
    return Product(
        asin=asin,
        title=_text(record["name"]),
        description=_text(record["full_description"]),
        bullet_points=tuple(map(_text, points)) if isinstance(points, list) else (_text(points),),
        pricing=_read_pricing(record.get("pricing")),
        options=_read_options(record.get("customization_options")),
        attributes=tuple(facts.get("attributes", _NO_ATTRIBUTES)),
        query=_text(record["query"]).lower().strip(),
        category=_text(record["category"]),
        product_category=_text(record["product_category"]),
        image=_text(images[0]),
        instruction=facts.get("instruction"),
        instruction_attributes=tuple(facts.get("instruction_attributes") or ()),
    )


def _text(value: Any) -> str:
    text = "" if value is None else str(value)
    # JSON can spell halves of characters, which no encoding can write.
    return text if text.isascii() else text.encode(errors="replace").decode()


def _read_pricing(text: str | None) -> tuple[float, ...]:
    """Read a text such as `$9.99$1,012.50`; of more than two prices the first two count."""
    digits = [_NOT_IN_NUMBERS.sub("", part) for part in (text or "").split("$")[1:]]
    return tuple(float(number) for number in digits if number)[:2] or (_NO_PRICE,)


def _read_options(raw: Mapping[str, Any] | None) -> dict[str, tuple[str, ...]]:
    return {
        name.lower(): tuple(_text(entry["value"]).strip().replace("/", " | ").lower() for entry in entries)
        for name, entries in (raw or {}).items()
        if entries is not None
    }
