"""The site of the documentation: what stands in mkdocs.yml is there, and it fetches nothing from elsewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a link, an anchor or a name of the API that leads nowhere fails the build."""
    folder = tmp_path_factory.mktemp("site")
    # Not with --quiet: it keeps warnings from --strict, too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


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
