"""The shop: a customer's present page, what can be clicked on it, and the effects of a click or a search."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from rollgym.envs.webshop.catalogue import Catalogue
from rollgym.envs.webshop.goals import Goal
from rollgym.envs.webshop.products import Product
from rollgym.envs.webshop.reward import NounExtractor, PurchaseScore, score_purchase

Page = Literal["index", "search_results", "item_page", "item_sub_page", "done"]
SearchEngine = Callable[[str, int], Sequence[int]]
"""Returns the numbers of the best products for a query, up to a limit."""

PER_PAGE = 10
MOST_RESULTS = 50
SEARCH, BACK, NEXT, PREVIOUS, BUY = "search", "back to search", "next >", "< prev", "buy now"
SUB_PAGES = ("description", "features", "reviews", "attributes")
_LONGEST_ACTION = 2_000
_RANDOM, _BY_FACET = "<r>", MappingProxyType({"<a>": "a", "<c>": "c", "<q>": "q"})


class Action(NamedTuple):
    """A customer's action: `search` or `click`, with its argument."""

    name: str
    argument: str


def parse_action(text: str) -> Action | None:
    """Read `name[argument]`, as greedily as WebShop, and any text after it; None if it is not of that form."""
    line = text.partition("\n")[0][:_LONGEST_ACTION]
    end = line.rfind("]")
    # Something stands between the brackets.
    begin = line.rfind("[", 0, max(end - 1, 0))
    return Action(line[:begin], line[begin + 1 : end].lower()) if begin > 0 else None


class Clickable(NamedTuple):
    """The target of a click.

    Attributes:
        kind: A button, a product in the results, or a value of an option.
        name: For an option's value, the option.
    """

    kind: Literal["button", "product", "option"]
    name: str = ""


@dataclass(slots=True)
class ShopVisit:
    """One visit of a customer.

    Attributes:
        catalogue: The products on sale.
        goal: The customer's goal.
        search: The search engine.
        nouns: Tells what kind of thing a title names.
        generator: For searches that ask for products at random.
        show_attributes: Whether products have a page with their attributes.
        page: The customer's present page.
        keywords: The search's keywords; None before the first search.
        results: Numbers of the products that were found.
        results_page: The page of the results, from 1 on.
        item: Number of the product that was opened.
        sub_page: The open one of its pages.
        options: Chosen values by the option's name.
        visited: Products that were opened since the customer came from the start page.
        score: Reward of the purchase; None before it.
    """

    catalogue: Catalogue
    goal: Goal
    search: SearchEngine
    nouns: NounExtractor
    generator: np.random.Generator
    show_attributes: bool = False
    page: Page = "index"
    keywords: tuple[str, ...] | None = None
    results: tuple[int, ...] = ()
    results_page: int = 1
    item: int | None = None
    sub_page: str = ""
    options: dict[str, str] = field(default_factory=dict)
    visited: set[int] = field(default_factory=set)
    score: PurchaseScore | None = None

    @property
    def product(self) -> Product:
        """Return the product whose page is open."""
        assert self.item is not None, f"no product is open on page {self.page}"
        return self.catalogue.product(self.item)

    @property
    def shown(self) -> tuple[int, ...]:
        """The products on this page of the results."""
        start = PER_PAGE * (self.results_page - 1)
        return self.results[start : start + PER_PAGE]

    @property
    def url(self) -> str:
        """Address of the page, without host and session."""
        keywords = "+".join(self.keywords or ())
        if self.page == "search_results":
            return f"/search_results/{keywords}/{self.results_page}"
        if self.page in ("item_page", "item_sub_page"):
            opened = f"{self.product.asin}/{keywords}/{self.results_page}"
            if self.page == "item_sub_page":
                opened += f"/{self.sub_page.title()}"
            return f"/{self.page}/{opened}/{json.dumps(self.options)}"
        if self.page == "done":
            return f"/done/{self.product.asin}/{json.dumps(self.options)}"
        return "/"

    def clickables(self) -> Mapping[str, Clickable]:
        """Return what can be clicked, by its text in lower case, in WebShop's order."""
        button = Clickable("button")
        match self.page:
            case "index":
                return {SEARCH: button}
            case "search_results":
                names = [BACK, PREVIOUS, NEXT] if self.results_page > 1 else [BACK, NEXT]
                found = dict.fromkeys(names, button)
                for number in self.shown:
                    found[self.catalogue.product(number).asin.lower()] = Clickable("product")
                return found
            case "item_page":
                found = dict.fromkeys([BACK, PREVIOUS, *self.sub_pages(), BUY], button)
                for name, values in self.product.options.items():
                    # Of two options with one value, the later takes the click.
                    found.update(dict.fromkeys(values, Clickable("option", name)))
                return found
            case "item_sub_page":
                return {BACK: button, PREVIOUS: button}
            case "done":
                return {}

    def sub_pages(self) -> tuple[str, ...]:
        """Return the pages that a product has beside its own."""
        return SUB_PAGES if self.show_attributes else SUB_PAGES[:-1]

    def act(self, action: Action | None) -> bool:
        """Search or click; give whether that was possible here. If not, nothing happens."""
        if action is None or self.page == "done":
            return False
        if action.name == "search":
            self._find(tuple(action.argument.split(" ")))
            return True
        clickable = self.clickables().get(action.argument) if action.name == "click" else None
        if clickable is None or action.argument == SEARCH:
            return False
        self._click(action.argument, clickable)
        return True

    def _find(self, keywords: tuple[str, ...]) -> None:
        self.page, self.keywords, self.results_page = "search_results", keywords, 1
        self.item, self.options = None, {}
        first, rest = keywords[0], " ".join(keywords[1:]).strip()
        if first == _RANDOM:
            count = min(MOST_RESULTS, len(self.catalogue))
            drawn = self.generator.choice(len(self.catalogue), size=count, replace=False)
            self.results = tuple(map(int, drawn))
        elif first in _BY_FACET:
            self.results = tuple(self.catalogue.facets.find(f"{_BY_FACET[first]} {rest}"))
        else:
            self.results = tuple(self.search(" ".join(keywords), MOST_RESULTS))

    def _click(self, text: str, clickable: Clickable) -> None:
        # A button's text decides before anything else of the same text.
        if text == BUY:
            assert self.item is not None, "only a product's page has this button"
            price = self.catalogue.price(self.item)
            self.score = score_purchase(self.product, self.goal, price, self.options, self.nouns)
            self.page = "done"
        elif text == BACK:
            self.page, self.keywords, self.results, self.results_page = "index", None, (), 1
            self.item, self.options, self.visited = None, {}, set()
        elif text in (NEXT, PREVIOUS) and self.page == "search_results":
            self.results_page += 1 if text == NEXT else -1
            self.item, self.options = None, {}
        elif text == PREVIOUS and self.page == "item_page":
            self.page, self.item, self.options = "search_results", None, {}
        elif text == PREVIOUS:
            self.page = "item_page"
        elif self.page == "item_page" and text in self.sub_pages():
            self.page, self.sub_page = "item_sub_page", text
        elif clickable.kind == "product":
            asins = (self.catalogue.product(number).asin.lower() for number in self.shown)
            self.item = self.shown[list(asins).index(text)]
            self.visited.add(self.item)
            self.page = "item_page"
        else:
            self.options[clickable.name] = text
