"""What pyproject.toml cannot say: the README of the package index, how builds begin, and how links are packed."""

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
# Python 3.10 has no reader of TOML. Without one, pip says there that rollgym needs a newer Python.
SOURCE = re.findall(
    r'^Source = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
)[0]
FLOORS = sorted(path.name for path in (ROOT / "rollgym").iterdir() if path.is_symlink())


def readme_of_the_index(text: str, source: str) -> str:
    """Return the README with absolute links: relative ones lead nowhere on the page of a package index.

    Args:
        text: The README.
        source: The address of the repository.
    """
    raw = source.replace("https://github.com/", "https://raw.githubusercontent.com/")

    def absolute(match: re.Match[str]) -> str:
        before, target = match.groups()
        is_image = before.startswith(("!", "<img", "<source")) and not before.endswith('href="')
        return before + (f"{raw}/main/{target}" if is_image else f"{source}/blob/main/{target}")

    relative = r"(?![a-z]+:|#|/)([^)\s\"]+)"
    for before in (
        r"(!?\[[^\]]*\]\()",
        r"((?:<img|<source)\b[^>]*\bsrc(?:set)?=\")",
        r"(<a\b[^>]*\bhref=\")",
    ):
        text = re.sub(before + relative, absolute, text)
    # An image that is a link has two targets, of which the first pattern sees the inner one.
    return re.sub(rf"(\]\([^)]*\)\]\(){relative}", absolute, text)


class TreeAsItIs(sdist):
    """Packs the floors once, as folders at the top, and `rollgym/<floor>` as the links that they are."""

    def make_release_tree(self, base_dir: str, files: Iterable[str]) -> None:
        """Make the folder that is packed."""
        links = [os.path.join("rollgym", floor) for floor in FLOORS]
        once = [each for each in files if not each.startswith(tuple(f"{link}{os.sep}" for link in links))]
        super().make_release_tree(base_dir, once)
        for link, floor in zip(links, FLOORS, strict=True):
            os.symlink(os.path.join("..", floor), os.path.join(base_dir, link))


class BuildAnew(build_py):
    """Builds what is there: modules that an older build of the same clone left would be packed, too."""

    def run(self) -> None:
        """Copy the modules into an empty folder."""
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(
    long_description=readme_of_the_index((ROOT / "README.md").read_text(encoding="utf-8"), SOURCE),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildAnew, "sdist": TreeAsItIs},
)
