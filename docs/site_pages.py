"""What the site shows beside docs/: pages of the repository's root, files that pages link to, drawings, and tutorials.

mkdocs calls it while it builds (`hooks` in mkdocs.yml). A link that leads out of docs/ leads to a copy in the site, so
that pages read the same in a checkout, on a forge and in the site. Mermaid flowcharts become SVG here, since Mermaid
itself would be a script of 3 MB, and would have to come from another host. Notebooks become pages.
"""

import json
import posixpath
import re
import runpy
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_FRONT = "README.md"
_TUTORIALS = "tutorials"
_WITH_FOLDERS = ("configuration.md", "algorithms.md")
_ROOT_PAGES = ("ARCHITECTURE", "CHANGELOG", "CODE_OF_CONDUCT", "CONTRIBUTING", "README", "SECURITY")
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_DRAWING = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


# Not imported by name: what mkdocs calls is no package, and its folder is not where Python looks for modules.
_drawing = runpy.run_path(str(Path(__file__).with_name("layered_drawing.py")))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of a folder into the navigation, below the page of the folder's name."""
    for section in config.nav or []:
        for pages in section.values():
            for index, entry in enumerate(pages if isinstance(pages, list) else []):
                if isinstance(entry, dict) and (below := _below(*next(iter(entry.items())))):
                    pages[index] = below
    return config


def _below(title: str, page: object) -> dict[str, list[object]] | None:
    folder = ROOT / "docs" / str(page).removesuffix(".md")
    if not isinstance(page, str) or page not in _WITH_FOLDERS:
        return None
    names = sorted(each.name for each in folder.glob("*.md"))
    return {title: [page, *({_title(folder / name): f"{folder.name}/{name}"} for name in names)]}


def _title(page: Path) -> str:
    """What a page's first heading says behind its folder's name."""
    return page.read_text(encoding="utf-8").partition("\n")[0].partition(": ")[2]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, and all that pages link to, page by page."""
    for name in _ROOT_PAGES:
        page = f"{name}.md"
        files.append(File.generated(config, _address(page), abs_src_path=str(ROOT / page)))
    for notebook in (ROOT / "docs" / _TUTORIALS).glob("*.ipynb"):
        files.remove(files.get_file_from_path(f"{_TUTORIALS}/{notebook.name}"))
        page = f"{_TUTORIALS}/{notebook.stem}.md"
        files.append(File.generated(config, page, content=_notebook(notebook)))
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
    markdown = _DRAWING.sub(lambda found: _drawn(found[1], page), markdown)

    def moved(link: re.Match[str]) -> str:
        path = _resolved(page.file, link[2])
        if path is None:
            return link[0]
        return link[1] + posixpath.relpath(_address(path), here or ".") + link[3]

    return "".join(
        part if index % 2 else _LINK.sub(moved, part) for index, part in enumerate(_CODE.split(markdown))
    )


def _notebook(path: Path) -> str:
    """A notebook as Markdown: its text, its code, and what the code printed or drew."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            printed = "".join(output.get("text", data.get("text/plain", ())))
            if "image/png" in data:
                parts.append(
                    f'<img alt="What the code draws" src="data:image/png;base64,{data["image/png"].strip()}">'
                )
            elif printed:
                parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _drawn(text: str, page: Page) -> str:
    """A Mermaid flowchart as a picture."""
    try:
        arrows = _drawing["read_flowchart"](text)
        picture = _drawing["svg"](
            arrows, f"A graph of {', '.join(arrows)}; arrows lead to what each one imports"
        )
    except ValueError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error
    return f'<figure class="drawing">{picture}</figure>'


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
    if page.generated_by and page.abs_src_path:
        return str(Path(str(page.abs_src_path)).relative_to(ROOT))
    return f"docs/{page.src_uri}"


def _address(path: str) -> str:
    """Where the site has a file of the repository: docs/ and the root are one, all else is in files/."""
    if path == _FRONT:
        return "index.md"
    if path.startswith(f"docs/{_TUTORIALS}/"):
        path = path.replace(".ipynb", ".md")  # what the site makes of a notebook
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if "/" not in path else f"files/{path}"
