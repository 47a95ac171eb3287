"""The shop against what the original program was recorded to do: its loader, its goals, its pages."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollgym.envs.webshop.catalogue import Catalogue, build_catalogue
from rollgym.envs.webshop.products import read_products, search_text
from rollgym.envs.webshop.rendering import as_rich_text, as_text, page_parts
from rollgym.envs.webshop.shop import ShopVisit, parse_action
from rollgym.envs.webshop.sources import FileSource
from tests.support.recorded_data import recorded
from tests.support.shop_nouns import stub_nouns


def load(name: str) -> Any:
    return json.loads(recorded(f"webshop/{name}").read_text())


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    folder = tmp_path_factory.mktemp("catalogue")
    parts = ("raw_products", "attributes", "human_instructions")
    build_catalogue(FileSource(*(recorded(f"webshop/catalogue_{part}.json") for part in parts)), folder)
    return Catalogue(folder)


def test_products_as_the_original_reads_them(catalogue: Catalogue) -> None:
    expected = load("catalogue_processed_products.json")
    read = [catalogue.product(number) for number in range(len(catalogue))]
    assert [
        {
            "asin": product.asin,
            "Title": product.title,
            "name": product.title,
            "Description": product.description,
            "BulletPoints": list(product.bullet_points),
            "pricing": list(product.pricing),
            "Price": product.price_tag,
            "options": {name: list(values) for name, values in product.options.items()},
            "Attributes": list(product.attributes),
            "query": product.query,
            "category": product.category,
            "product_category": product.product_category,
            "MainImage": product.image,
            "Rating": "N.A.",
            "instruction_text": product.instruction,
            "instruction_attributes": list(product.instruction_attributes) or None,
        }
        for product in read
    ] == expected
    assert [list(product.options) for product in read] == [list(each["options"]) for each in expected]


def test_what_the_search_engine_reads(catalogue: Catalogue) -> None:
    products = [catalogue.product(number) for number in range(len(catalogue))]
    assert [{"id": product.asin, "contents": search_text(product)} for product in products] == load(
        "search_documents.json"
    )


def test_records_that_the_loader_drops() -> None:
    raw = load("catalogue_raw_products.json")
    kept = list(read_products(raw, {}))
    assert (len(raw), len(kept), len({product.asin for product in kept})) == (253, 250, 250)
    assert max(len(product.asin) for product in kept) == 10
    assert {product.attributes for product in kept} == {("DUMMY_ATTR",)}


@pytest.mark.parametrize("kind", ["human", "synthetic"])
def test_goals_and_prices(catalogue: Catalogue, kind: Any) -> None:
    expected = load(f"goals_{kind}.json")
    prices = {catalogue.product(number).asin: catalogue.price(number) for number in range(len(catalogue))}
    assert prices == expected["prices"]
    goals = [
        {
            "asin": goal.asin,
            "category": goal.category,
            "query": goal.query,
            "name": goal.name,
            "product_category": goal.product_category,
            "instruction_text": goal.instruction,
            "attributes": list(goal.attributes),
            "price_upper": goal.price_upper,
            "goal_options": goal.options if isinstance(goal.options, dict) else list(goal.options),
            "weight": goal.weight,
        }
        for goal in catalogue.goals(kind)
    ]
    assert goals == expected["goals"]


@pytest.mark.parametrize(("kind", "steps"), [("human", 421), ("synthetic", 416)])
def test_every_step_of_the_episodes(catalogue: Catalogue, kind: Any, steps: int) -> None:
    seen = 0
    for line in Path(recorded(f"webshop/episodes_{kind}.jsonl")).read_text().splitlines():
        episode = json.loads(line)
        found: list[int] = []
        shop = ShopVisit(
            catalogue,
            catalogue.goals(kind)[episode["goal_index"]],
            lambda query, limit, found=found: list(found),
            stub_nouns,
            np.random.default_rng(0),
        )
        assert_page(shop, episode["obs0"], episode["available0"])
        for step in episode["steps"]:
            if "search_result_asins" in step:
                found[:] = [catalogue.number(asin) for asin in step["search_result_asins"]]
            shop.act(parse_action(step["action"]))
            assert_page(shop, step["obs"], step["available"])
            assert shop.page == (step["page"] or "index")
            assert (shop.page == "done") == step["done"]
            assert (shop.score.total if shop.score else 0.0) == pytest.approx(step["reward"], abs=1e-9)
            if step["done"]:
                assert shop.score
                assert shop.score.describe() == pytest.approx(step["reward_info"], abs=1e-9)
                assert (shop.product.asin, shop.options) == (step["purchased"], step["options"])
            seen += 1
    assert seen == steps


def assert_page(shop: ShopVisit, shown: dict[str, str], available: dict[str, Any]) -> None:
    parts = page_parts(shop)
    assert as_text(parts) == shown["text"]
    assert as_rich_text(parts) == shown["text_rich"]
    assert list(shop.clickables()) == available["clickables"]
    assert (shop.page == "index") == available["has_search_bar"]
