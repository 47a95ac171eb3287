"""An expert that knows the goal and what every product is: it buys what is worth the full reward."""

from collections.abc import Mapping

from rollgym.envs.webshop.goals import NO_LIMIT
from rollgym.envs.webshop.products import Product
from rollgym.envs.webshop.reward import count_attributes, count_options, score_purchase
from rollgym.envs.webshop.shop import (
    BACK,
    BUY,
    MOST_RESULTS,
    NEXT,
    PER_PAGE,
    PREVIOUS,
    SEARCH,
    Action,
    ShopVisit,
)


def instruction_query(shop: ShopVisit) -> str:
    """Return what the customer says as keywords for a search: without the price, on one line."""
    goal = shop.goal
    limit = "" if goal.price_upper == NO_LIMIT else f", and price lower than {goal.price_upper:.2f} dollars"
    return " ".join(goal.instruction.removesuffix(limit).lower().split())


class Expert:
    """Plays one visit.

    Args:
        shop: The visit.
        search_anywhere: Whether a search is possible on pages without a search bar.
    """

    def __init__(self, shop: ShopVisit, *, search_anywhere: bool) -> None:
        self._shop = shop
        self._search_anywhere = search_anywhere
        self._fits: dict[int, Mapping[str, str] | None] = {}

    def act(self) -> Action:
        """Return the best action from here."""
        shop = self._shop
        match shop.page:
            case "index":
                return Action("search", self._query())
            case "search_results":
                return self._among_results()
            case "item_page":
                return self._at_product()
            case _:
                return Action("click", PREVIOUS)

    def _query(self) -> str:
        query = instruction_query(self._shop)
        found = self._shop.search(query, MOST_RESULTS)
        if query and any(self._choices(number) is not None for number in found):
            return query
        return " ".join(self._shop.goal.name.lower().split())

    def _among_results(self) -> Action:
        shop = self._shop
        start = PER_PAGE * (shop.results_page - 1)
        fitting = [index for index, number in enumerate(shop.results) if self._choices(number) is not None]
        # What is nearest by clicks: on this page, behind it, before it.
        for index in fitting:
            if start <= index < start + PER_PAGE:
                return Action("click", shop.catalogue.product(shop.results[index]).asin.lower())
        if any(index >= start for index in fitting):
            return Action("click", NEXT)
        if fitting:
            return Action("click", PREVIOUS)
        return Action("search", self._query()) if self._search_anywhere else Action("click", BACK)

    def _at_product(self) -> Action:
        shop = self._shop
        assert shop.item is not None
        choices = self._choices(shop.item)
        if choices is None:
            return Action("click", PREVIOUS)
        clickables = shop.clickables()
        for name, value in choices.items():
            # A value that an option further down has too cannot be chosen here.
            if shop.options.get(name) != value and clickables[value].name == name:
                return Action("click", value)
        return Action("click", BUY)

    def _choices(self, number: int) -> Mapping[str, str] | None:
        """Return the options to choose for the full reward; None if the product cannot earn it."""
        if number not in self._fits:
            self._fits[number] = self._fitting(number)
        return self._fits[number]

    def _fitting(self, number: int) -> Mapping[str, str] | None:
        goal, product = self._shop.goal, self._shop.catalogue.product(number)
        price = self._shop.catalogue.price(number)
        # The cheap checks come first: most products fail them.
        if price > goal.price_upper or count_attributes(product, goal.attributes) < len(goal.attributes):
            return None
        chosen = self._choose(product)
        score = score_purchase(product, goal, price, chosen, self._shop.nouns)
        return chosen if score.total == 1.0 else None

    def _choose(self, product: Product) -> dict[str, str]:
        goal = self._shop.goal
        wanted = list(goal.options.items()) if isinstance(goal.options, Mapping) else list(goal.options)
        chosen: dict[str, str] = {}
        offered = [(name, value) for name, values in product.options.items() for value in values]
        for each in wanted:
            name, value = each if isinstance(each, tuple) else ("", each)
            alike = [offer for offer in offered if offer[1] != SEARCH and count_options([offer[1]], [each])]
            # The very same first, then the same option's; a choice that was made already stays.
            alike.sort(key=lambda offer: (offer[1] != value, offer[0] != name, offer[0] in chosen))
            if alike and not count_options(list(chosen.values()), [each]):
                chosen[alike[0][0]] = alike[0][1]
        return chosen
