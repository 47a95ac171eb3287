"""Catalogues of WebShop-v0: the made-up one, those from files, and how they are kept."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from rollgym.envs.webshop import prepare, sources
from rollgym.envs.webshop.catalogue import Catalogue, build_catalogue, open_catalogue
from rollgym.envs.webshop.products import read_products
from rollgym.envs.webshop.reward import heuristic_nouns, score_purchase
from rollgym.envs.webshop.sources import (
    CatalogueError,
    FileSource,
    find_files,
    generate_records,
    stream_array,
)

_DIGEST = """
import hashlib, json, sys
from rollgym.envs.webshop.sources import generate_records
made = generate_records()
text = json.dumps([made.products, made.attributes, made.human_instructions])
sys.stdout.write(hashlib.sha256(text.encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return open_catalogue()


def write_files(folder: Path, count: int = 40, suffix: str = "_1000", indent: int | None = None) -> None:
    """Write part of the made-up catalogue under the names of WebShop's files."""
    made = generate_records(per_kind=2)
    folder.mkdir(exist_ok=True)
    products = json.dumps(list(made.products)[:count], indent=indent, ensure_ascii=False)
    (folder / f"items_shuffle{suffix}.json").write_text(products, encoding="utf-8")
    (folder / f"items_ins_v2{suffix}.json").write_text(json.dumps(made.attributes))
    (folder / "items_human_ins.json").write_text(json.dumps(made.human_instructions))


def test_what_the_made_up_shop_has(catalogue: Catalogue) -> None:
    products = [catalogue.product(number) for number in range(len(catalogue))]
    assert len(products) == 2000
    assert len({product.query for product in products}) == 25
    assert len({product.asin for product in products}) == 2000
    assert {catalogue.number(product.asin) for product in products} == set(range(2000))
    assert {len(product.pricing) for product in products} == {1, 2}
    assert {len(product.options) for product in products} == {0, 1, 2}
    assert len(catalogue.goals("human")) > 6500
    assert len(catalogue.goals("synthetic")) > 8_000


@pytest.mark.parametrize("kind", ["human", "synthetic"])
def test_every_goal_has_a_purchase_of_the_full_reward(catalogue: Catalogue, kind: Any) -> None:
    goals = catalogue.goals(kind)
    for goal in goals:
        number = catalogue.number(goal.asin)
        assert number is not None
        product = catalogue.product(number)
        if isinstance(goal.options, dict):
            chosen = goal.options
        else:
            names = {value: name for name, values in product.options.items() for value in values}
            chosen = {names[value]: value for value in goal.options}
        score = score_purchase(product, goal, catalogue.price(number), chosen, heuristic_nouns)
        assert score.total == 1.0, goal


def test_what_is_held_out_is_asked_for_nowhere_else(catalogue: Catalogue) -> None:
    goals = catalogue.goals("human")
    wishes = [(goal.asin, frozenset(goal.attributes), frozenset(goal.options)) for goal in goals]
    assert len(set(wishes)) == len(wishes)


def test_the_made_up_shop_is_the_same_in_every_process() -> None:
    outcomes = {
        subprocess.run(
            [sys.executable, "-c", _DIGEST],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outcomes) == 1


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_an_array_is_read_object_by_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(sources, "_CHUNK", chunk)
    write_files(tmp_path, count=3, indent=1)
    path = tmp_path / "items_shuffle_1000.json"
    assert list(stream_array(path)) == json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a JSON array"),
        ("{}", "not a JSON array"),
        ('[{"asin": "A"}, {"asi', "cannot be read"),
        ('[{"asin": "A"}', "cannot be read"),
        ("[1]", "holds int"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "items.json"
    path.write_text(text)
    with pytest.raises(CatalogueError, match=message):
        list(stream_array(path))


def test_which_files_are_taken(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match=r"items_shuffle_1000\.json"):
        find_files(tmp_path)
    write_files(tmp_path)
    assert find_files(tmp_path).products.name == "items_shuffle_1000.json"
    write_files(tmp_path, suffix="")
    assert find_files(tmp_path).products.name == "items_shuffle.json"
    assert find_files(tmp_path, 1000).products.name == "items_shuffle_1000.json"
    assert find_files(tmp_path, 100_000).products.name == "items_shuffle.json"
    (tmp_path / "items_human_ins.json").unlink()
    assert find_files(tmp_path).human_instructions() == {}


def test_files_give_a_catalogue(tmp_path: Path) -> None:
    data, cache = tmp_path / "data", tmp_path / "cache"
    write_files(data)
    whole = open_catalogue(str(data), None, str(cache))
    assert len(whole) == 40
    assert min(len(whole.goals("human")), len(whole.goals("synthetic"))) > 40
    assert open_catalogue(str(data), None, str(cache)) is whole
    part = open_catalogue(str(data), 10, str(cache))
    assert [part.product(number) for number in range(10)] == [whole.product(number) for number in range(10)]
    assert len(part) == 10


def test_odd_records() -> None:
    record = {
        "asin": "B000000001",
        "name": "Half a \ud83d character",
        "full_description": None,
        "small_description": None,
        "pricing": "from $1,250.50 to $2,000, was $3000",
        "customization_options": {"Size ": None, "Fit": [{"value": " Slim/Tall "}]},
        "query": " Desk ",
        "category": "garden",
        "product_category": "A › B",
        "images": [],
    }
    (product,) = read_products([record], {})
    assert product.title == "Half a ? character"
    assert (product.description, product.bullet_points, product.image) == ("", ("",), "")
    assert (product.pricing, product.price_tag) == ((1250.5, 2000.0), "$1250.5 to $2000.0")
    assert product.options == {"fit": ("slim | tall",)}
    assert product.query == "desk"
    (unpriced,) = read_products([{**record, "pricing": "call us"}], {})
    assert unpriced.pricing == (100.0,)


def test_a_catalogue_without_goals_of_a_kind(tmp_path: Path) -> None:
    write_files(tmp_path)
    found = find_files(tmp_path)
    (tmp_path / "built").mkdir()
    build_catalogue(FileSource(found.products, found.details, None), tmp_path / "built")
    built = Catalogue(tmp_path / "built")
    assert len(built.goals("human")) == 0
    assert len(built.goals("synthetic")) > 0


def test_processes_build_a_catalogue_once_and_share_it(tmp_path: Path) -> None:
    data, cache = tmp_path / "data", tmp_path / "cache"
    write_files(data)
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(2) as pool:
        mapped = pool.map(_mapped_files, [(str(data), str(cache))] * 2)
    folders = [path for path in cache.iterdir() if path.is_dir()]
    assert len(folders) == 1
    assert (
        mapped
        == [
            {
                "asins.rows",
                "posting_documents.npy",
                "posting_scores.npy",
                "prices.npy",
                "products.rows",
                "terms.rows",
            }
        ]
        * 2
    )


def _mapped_files(places: tuple[str, str]) -> set[str]:
    """Open a catalogue, use it, and name those of its files that are mapped from disk."""
    found = open_catalogue(places[0], None, places[1])
    assert found.index.search("soft wool scarf", 5)
    assert found.number(found.product(3).asin) == 3
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = {Path(line.split()[-1]).name for line in lines if places[1] in line and line.split()[1] == "r--s"}
    return names & {
        "asins.rows",
        "posting_documents.npy",
        "posting_scores.npy",
        "prices.npy",
        "products.rows",
        "terms.rows",
    }


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CatalogueError, match="cache_dir"):
        open_catalogue(None, None, str(tmp_path / "file"))


def test_goals_are_counted_from_zero(catalogue: Catalogue) -> None:
    goals = catalogue.goals("human")
    for index in (-1, len(goals)):
        with pytest.raises(IndexError, match="counted from 0"):
            goals[cast(int, index)]


def test_a_catalogue_is_prepared_before_it_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--data-dir", str(tmp_path), "--cache-dir", str(tmp_path / "cache")]
    assert prepare.main(places) == 1
    assert "has no catalogue" in capsys.readouterr().err
    write_files(tmp_path)
    assert prepare.main([*places, "--num-products", "12"]) == 0
    assert capsys.readouterr().out.startswith("12 products, ")
