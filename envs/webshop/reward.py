"""The reward of a purchase, as in WebShop: of type (by the nouns of a title), attributes, options and price."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rapidfuzz import fuzz
from rapidfuzz.utils import default_process

from rollgym.envs.webshop.goals import Goal
from rollgym.envs.webshop.products import Product

NounExtractor = Callable[[str], Sequence[str]]
"""Gives the nouns of a title, in lower case and as often as they occur."""

_ALIKE = 85
_LEVELS = 2
_SCORE_WITHOUT_NOUNS = 0.2

# Those that WebShop folds colours into, in its order: the first that is contained wins, wherever in a word it is.
_COLOUR_WORDS = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal
dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory
ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor
mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand
sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut
wheat white wine yellow
"""
_COLOURS = tuple(_COLOUR_WORDS.split())


@dataclass(frozen=True, slots=True)
class PurchaseScore:
    """A purchase's reward and its parts, each of them between 0 and 1.

    Attributes:
        total: The reward; 1 only if everything is as the customer wants it.
        type: Factor for the kind of product.
        attributes: Share of the wanted attributes that the product has.
        options: Share of the wanted options that were chosen; None if none are wanted.
        price: Whether the price is within the limit.
        query_match: Whether both were found with the same query.
        category_match: Whether they share two levels of the shop's tree.
        title_score: Share of the nouns of the wanted title that the bought one has.
        weights: Weights of attributes, options and price.
    """

    total: float
    type: float
    attributes: float
    options: float | None
    price: bool
    query_match: bool
    category_match: bool
    title_score: float
    weights: tuple[float, float, float]

    def describe(self) -> dict[str, Any]:
        """Return the parts under WebShop's names."""
        att, option, price = self.weights
        parts = {
            "r_type": self.type,
            "r_att": self.attributes,
            "w_att": att,
            "query_match": self.query_match,
            "category_match": self.category_match,
            "title_score": self.title_score,
            "r_price": self.price,
            "w_price": price,
        }
        return parts if self.options is None else {**parts, "r_option": self.options, "w_option": option}


def score_purchase(
    product: Product, goal: Goal, price: float, options: Mapping[str, str], nouns: NounExtractor
) -> PurchaseScore:
    """Score buying a product at a price with options."""
    query_match = product.query == goal.query
    category_match = len(_levels(product.product_category) & _levels(goal.product_category)) >= _LEVELS
    title = title_score(product.title, goal.name, nouns)
    kind = 1.0 if query_match or category_match or title > 0.2 else 0.5
    # These two win even if query and category match.
    if title < 0.1:
        kind = 0.1
    if title == 0.0:
        kind = 0.0
    attributes = count_attributes(product, goal.attributes)
    wanted = list(goal.options.items()) if isinstance(goal.options, Mapping) else list(goal.options)
    chosen = count_options(list(options.values()), wanted)
    affordable = price <= goal.price_upper
    count = len(goal.attributes) + len(wanted) + 1
    return PurchaseScore(
        total=kind * ((attributes + chosen + affordable) / count),
        type=kind,
        attributes=attributes / len(goal.attributes),
        options=chosen / len(wanted) if wanted else None,
        price=affordable,
        query_match=query_match,
        category_match=category_match,
        title_score=title,
        weights=(len(goal.attributes) / count, len(wanted) / count, 1 / count),
    )


def title_score(bought: str, wanted: str, nouns: NounExtractor) -> float:
    """Return the share of the nouns of a wanted title that a bought one has."""
    looked_for = nouns(wanted)
    return len(set(nouns(bought)) & set(looked_for)) / len(looked_for) if looked_for else _SCORE_WITHOUT_NOUNS


def count_attributes(product: Product, wanted: Sequence[str]) -> int:
    """Count the wanted attributes that a product has, by its attributes or by what is written about it."""
    texts = (product.title.lower(), " ".join(product.bullet_points).lower(), product.description.lower())
    return sum(
        any(_alike(attribute, each) for each in product.attributes)
        or any(attribute in text for text in texts)
        for attribute in wanted
    )


def count_options(chosen: Sequence[str], wanted: Sequence[str | tuple[str, str]]) -> int:
    """Count the wanted options that were chosen.

    Args:
        chosen: Values that were chosen.
        wanted: Values, or pairs of name and value. In a pair a colour is folded only if it is the whole value.
    """
    folded = [_fold(value) for value in chosen]
    return sum(any(_alike(_fold(each), value) for value in folded) for each in wanted)


def _levels(category: str) -> set[str]:
    return {level.strip() for level in category.split("›")}


def _fold(value: str | tuple[str, str]) -> str:
    # Of a pair, the original compares what Python prints.
    return next((colour for colour in _COLOURS if colour in value), str(value))


def _alike(first: str, second: str) -> bool:
    """Whether two texts are nearly the same as sets of words, as WebShop's library rounds it."""
    # Texts of nothing but signs have no words, and still equal themselves.
    if first == second:
        return True
    return round(fuzz.token_set_ratio(_plain(first), _plain(second))) > _ALIKE


@lru_cache(maxsize=2**14)
def _plain(text: str) -> str:
    return default_process(text.encode("ascii", "ignore").decode())


_WORD = re.compile(r"[A-Za-z]{2,}")
_MODEL = "en_core_web_sm"

# What titles of shops have beside nouns and what the endings below do not tell.
_NO_NOUN_LIST = """
a an the of for with and or in on to by from at is are it its this that your our my you up as not no non all
any new best good great big small large mini extra super ultra pro premium classic everyday deluxe modern
vintage long short high low wide slim thin thick heavy light soft hard dry wet hot cold warm cool fast slow
full free easy safe natural organic fresh pure raw rich real black white red blue green yellow pink purple
grey gray brown old young men women adult cute nice fine double single dual portable wireless adjustable use
clean carry apply find me looking want need
"""
_NO_NOUN_WORDS = frozenset(_NO_NOUN_LIST.split())
_NO_NOUN = re.compile(r"(?:able|ible|ful|less|ous|ive|proof|resistant|friendly|tested|ish|ly|ed|ing)$")


def noun_extractor(tagger: str) -> NounExtractor:
    """Return an extractor by its name.

    Raises:
        ValueError: The name is unknown, or its dependencies are not installed.
    """
    if tagger == "heuristic":
        return heuristic_nouns
    if tagger == "spacy":
        return spacy_nouns()
    raise ValueError(f"noun_tagger must be 'heuristic' or 'spacy', not {tagger!r}")


def heuristic_nouns(title: str) -> list[str]:
    """Return the words that are neither known for something else nor end like it."""
    words = (word.lower() for word in _WORD.findall(title))
    return [word for word in words if word not in _NO_NOUN_WORDS and not _NO_NOUN.search(word)]


@lru_cache(maxsize=1)
def spacy_nouns() -> NounExtractor:
    """Return the extractor that WebShop uses, spaCy's small English model.

    Raises:
        ValueError: The model is not installed.
    """
    try:
        import spacy

        model: Any = spacy.load(_MODEL)
    except (ImportError, OSError) as error:
        raise ValueError(
            f"noun_tagger 'spacy' needs spaCy and its model {_MODEL} ({error}); install them, or use 'heuristic'"
        ) from error

    @lru_cache(maxsize=65536)
    def nouns(title: str) -> tuple[str, ...]:
        return tuple(token.text.lower() for token in model(title) if token.pos_ in ("NOUN", "PROPN"))

    return nouns
