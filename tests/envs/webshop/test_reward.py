"""The reward of WebShop-v0 against cases that the original program was recorded on, and by itself."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from rollgym.envs.webshop.goals import Goal
from rollgym.envs.webshop.products import Product
from rollgym.envs.webshop.reward import (
    count_options,
    heuristic_nouns,
    noun_extractor,
    score_purchase,
    title_score,
)
from tests.support.recorded_data import recorded
from tests.support.shop_nouns import stub_nouns


def cases(name: str) -> Iterator[dict[str, Any]]:
    with recorded(name).open() as lines:
        yield from map(json.loads, lines)


def product_of(fields: dict[str, Any]) -> Product:
    return Product(
        asin=fields["asin"],
        title=fields["name"],
        description=fields["Description"],
        bullet_points=tuple(fields["BulletPoints"]),
        pricing=(0.0,),
        options={},
        attributes=tuple(fields["Attributes"]),
        query=fields["query"],
        category="",
        product_category=fields["product_category"],
        image="",
        instruction=None,
        instruction_attributes=(),
    )


def goal_of(fields: dict[str, Any]) -> Goal:
    options = fields["goal_options"]
    return Goal(
        asin=fields["asin"],
        name=fields["name"],
        query=fields["query"],
        category="",
        product_category=fields["product_category"],
        instruction="",
        attributes=tuple(fields["attributes"]),
        options=options if isinstance(options, dict) else tuple(options),
        price_upper=fields["price_upper"],
        weight=1.0,
    )


def test_recorded_rewards_and_their_parts() -> None:
    seen = 0
    for case in cases("webshop/reward_cases.jsonl"):
        score = score_purchase(
            product_of(case["product"]), goal_of(case["goal"]), case["price"], case["options"], stub_nouns
        )
        assert score.total == pytest.approx(case["reward"], abs=1e-9), case["id"]
        assert score.describe() == pytest.approx(case["info"], abs=1e-9), case["id"]
        seen += 1
    assert seen == 1800


def test_recorded_matches_of_options() -> None:
    seen = 0
    for case in cases("webshop/option_match_cases.jsonl"):
        wanted = [tuple(each) if isinstance(each, list) else each for each in case["goal"]]
        assert count_options(case["purchased"], wanted) == case["num_matches"], case
        seen += 1
    assert seen == 400


@pytest.mark.parametrize(
    ("chosen", "wanted", "matches"),
    [
        (["navy blue"], ["royal blue"], 1),
        (["titanium"], ["tan"], 1),
        (["red"], ["layered wood"], 1),
        (["red"], [("finish", "layered wood")], 0),
        (["red"], [("finish", "red")], 1),
        (["x-large"], ["large"], 1),
        (["6 ft"], ["10 feet"], 0),
        ([], ["red"], 0),
        (["½"], ["½"], 1),
    ],
)
def test_options_that_look_alike(chosen: list[str], wanted: list[Any], matches: int) -> None:
    assert count_options(chosen, wanted) == matches


def test_nouns_of_a_title() -> None:
    title = "Halden Ultra Water Resistant Hiking Boots for Women - Long Lasting, 2 Pack"
    assert heuristic_nouns(title) == ["halden", "water", "boots", "pack"]
    assert title_score("anything", "12 x 4 large", heuristic_nouns) == 0.2
    with pytest.raises(ValueError, match="heuristic"):
        noun_extractor("guess")
