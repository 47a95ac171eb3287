"""The site of the documentation is whole, works from disk and on a phone, and fetches nothing from elsewhere."""

import fcntl
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.support.browser import Witness, running_browser

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, one for all workers; a link, an anchor or a name that leads nowhere fails the build."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, built = base / "site", base / "site.built"
    # Not with --quiet: it keeps warnings from --strict, too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    with (base / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            ended = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
            )
            assert ended.returncode == 0, ended.stdout + ended.stderr
            built.touch()
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as opened:
        yield opened


PHONE = {"width": 390, "height": 844}
SCREENS = 10
"""How long a page may be on a phone."""
LONG = ("ARCHITECTURE.html", "CHANGELOG.html", "files/")
"""Whole by their nature: the plan of the house, the history, and copies of files beside the docs."""
LARGEST_PICTURE = 150_000


@pytest.mark.slow
def test_search_finds_words_in_pages_that_are_opened_from_disk(site: Path, browser: Browser):
    page = browser.new_page()
    witness = Witness(page)
    page.goto((site / "index.html").as_uri())
    page.locator(".md-search__input").click()
    page.keyboard.type("staleness")
    page.locator(".md-search-result__item").first.wait_for()
    assert "staleness" in page.locator(".md-search-result__list").inner_text().lower()
    assert witness.complaints == []
    assert [address for address in witness.requested if not address.startswith("file:")] == []
    page.close()


@pytest.mark.slow
def test_no_page_is_wider_than_a_phone_and_none_is_long(site: Path, browser: Browser):
    page = browser.new_page(viewport=PHONE)
    wide, long, broken = [], [], []
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri(), wait_until="domcontentloaded")
        name = path.relative_to(site).as_posix()
        width, height = page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        )
        if width > PHONE["width"]:
            wide.append(name)
        if height > SCREENS * PHONE["height"] and not name.startswith(LONG):
            long.append((name, round(height / PHONE["height"], 1)))
        broken += page.evaluate(
            "[...document.querySelectorAll('li > strong > code')].filter(key => key.getClientRects().length > 1)"
            ".map(key => key.textContent)"
        )
    page.close()
    assert (wide, long, broken) == ([], [], [])


@pytest.mark.slow
def test_every_picture_is_seen_says_what_it_shows_and_is_small(site: Path, browser: Browser):
    page = browser.new_page(viewport=PHONE)
    faults, seen = [], set()
    for path in sorted(site.rglob("*.html")):
        if "<img" not in path.read_text():
            continue
        page.goto(path.as_uri())
        for source, alt, width in page.evaluate(
            "[...document.querySelectorAll('article img')].map(img => [img.src, img.alt, img.naturalWidth])"
        ):
            seen.add(Path(source).name)
            if len(alt) < 10 or width == 0:
                faults.append((path.name, source[-60:], alt, width))
    page.close()
    assert faults == []
    pictures = {each.name: each.stat().st_size for each in (ROOT / "docs" / "images").iterdir()}
    assert pictures.keys() <= seen, "a picture that no page shows"
    assert {name: size for name, size in pictures.items() if size > LARGEST_PICTURE} == {}


@pytest.mark.slow
def test_every_drawing_is_a_picture(site: Path, browser: Browser):
    assert [page.name for page in site.rglob("*.html") if "flowchart TD" in page.read_text()] == []
    page = browser.new_page()
    page.goto((site / "ARCHITECTURE.html").as_uri())
    drawings = page.locator(".drawing svg")
    assert drawings.count() == 6
    for index in range(drawings.count()):
        box = drawings.nth(index).bounding_box()
        assert box is not None
        assert min(box["width"], box["height"]) > 80
    page.close()


def test_a_flowchart_is_drawn_from_top_to_bottom():
    drawing = runpy.run_path(str(ROOT / "docs" / "layered_drawing.py"))
    arrows = drawing["read_flowchart"](
        "flowchart TD\n  a --> b\n  b --> c\n  a --> d\n  d --> c\n  a --> c\n  e"
    )
    assert arrows == {"a": ["b", "d", "c"], "b": ["c"], "c": [], "d": ["c"], "e": []}
    picture = drawing["svg"](arrows, "a < b")
    assert "<title>a &lt; b</title>" in picture
    heights = {name: float(y) for y, name in re.findall(r'y="([\d.]+)" text-anchor="middle">(\w)<', picture)}
    assert heights["a"] < heights["b"] == heights["d"] < heights["c"]
    assert picture.count("<path d=") == 5 + 1, "an arrow each, and the tip"


@pytest.mark.parametrize("text", ["flowchart LR\na --> b", "flowchart TD\na -.-> b"])
def test_what_cannot_be_drawn_is_refused(text: str):
    with pytest.raises(ValueError, match="only"):
        runpy.run_path(str(ROOT / "docs" / "layered_drawing.py"))["read_flowchart"](text)


def test_arrows_in_a_circle_are_refused():
    with pytest.raises(ValueError, match="circle among a, b"):
        runpy.run_path(str(ROOT / "docs" / "layered_drawing.py"))["svg"]({"a": ["b"], "b": ["a"]}, "")


@pytest.mark.slow
def test_the_site_needs_no_other_host(site: Path):
    loaded = re.compile(
        r"<(?:script|img|iframe)[^>]+src=\"https?:|<link[^>]+rel=\"stylesheet\"[^>]+href=\"https?:"
    )
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    assert [str(page) for page in pages if loaded.search(page.read_text())] == []


@pytest.mark.slow
def test_what_pages_link_to_beside_the_docs_is_in_the_site(site: Path):
    assert (site / "files" / "examples" / "reward.py").read_text() == (
        ROOT / "examples" / "reward.py"
    ).read_text()
    assert 'href="ARCHITECTURE.html"' in (site / "index.html").read_text()


@pytest.mark.slow
def test_every_public_name_has_its_place_in_the_api(site: Path):
    import rollgym

    text = "".join(page.read_text() for page in (site / "api").rglob("*.html"))
    missing = [name for name in rollgym.__all__ if name != "__version__" and f'.{name}"' not in text]
    assert missing == []
