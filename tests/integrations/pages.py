"""Programs of the pages for users of other libraries (docs/coming_from/*.md), run where the library is installed."""

from typing import Any

from tests.support.client_server import ServerProcess
from tests.support.processes import ROOT
from tests.support.snippets import Fence, fences_of

_ADDRESS = "http://127.0.0.1:8000"


def blocks(page: str) -> list[Fence]:
    """The Python blocks of a page that name a test of this folder."""
    found = [
        fence
        for fence in fences_of(ROOT / "docs" / "coming_from" / page)
        if fence.language == "python" and fence.run_by.startswith("tests/integrations/")
    ]
    assert found, page
    return found


def run_block(text: str, server: ServerProcess, **names: Any) -> dict[str, Any]:
    """Run a program, with a server at the address that it names; gives its names."""
    defined: dict[str, Any] = {"__name__": "__main__", **names}
    exec(compile(text.replace(_ADDRESS, server.url), "page", "exec"), defined)
    return defined
