"""What the site shows beside docs/: pages of the repository's root, and files that pages link to.

mkdocs calls it while it builds (`hooks` in mkdocs.yml). A link that leads out of docs/ leads to a copy in the site, so
that pages read the same in a checkout, on a forge and in the site.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_FRONT = "README.md"
_ROOT_PAGES = ("ARCHITECTURE", "CHANGELOG", "CODE_OF_CONDUCT", "CONTRIBUTING", "README", "SECURITY")
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, and all that pages link to, page by page."""
    for name in _ROOT_PAGES:
        page = f"{name}.md"
        files.append(File.generated(config, _address(page), abs_src_path=str(ROOT / page)))
    waiting = list(files.documentation_pages())
    while waiting:
        for path in _targets(waiting.pop()):
            if files.get_file_from_path(_address(path)) is None and (ROOT / path).is_file():
                added = File.generated(config, _address(path), abs_src_path=str(ROOT / path))
                files.append(added)
                waiting += [added] if added.is_documentation_page() else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links of a page lead to where the site has what they name."""
    here = posixpath.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        path = _resolved(page.file, link[2])
        if path is None:
            return link[0]
        return link[1] + posixpath.relpath(_address(path), here or ".") + link[3]

    return "".join(
        part if index % 2 else _LINK.sub(moved, part) for index, part in enumerate(_CODE.split(markdown))
    )


def _targets(page: File) -> list[str]:
    """The files of the repository that a page links to, as paths from its root."""
    parts = _CODE.split(page.content_string)[::2]
    found = [_resolved(page, link[2]) for part in parts for link in _LINK.finditer(part)]
    return [path for path in found if path is not None]


def _resolved(page: File, link: str) -> str | None:
    """What a link of a page names, as a path from the root of the repository; None for another host's."""
    if ":" in link:
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(_origin(page)), link))
    if (ROOT / path).is_dir() and (ROOT / path / _FRONT).is_file():
        return posixpath.join(path, _FRONT)
    return path


def _origin(page: File) -> str:
    """Where the repository has a page."""
    if page.generated_by:
        return str(Path(str(page.abs_src_path)).relative_to(ROOT))
    return f"docs/{page.src_uri}"


def _address(path: str) -> str:
    """Where the site has a file of the repository: docs/ and the root are one, all else is in files/."""
    if path == _FRONT:
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if "/" not in path else f"files/{path}"
