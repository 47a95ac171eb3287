"""The examples of docs/clients.md run as they stand there."""

import re

import pytest

from tests.support.client_server import ServerProcess
from tests.support.processes import ROOT

PAGE = (ROOT / "docs" / "clients.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.strip().splitlines()[-1][:40])
def test_an_example_runs(server: ServerProcess, example: str) -> None:
    assert ADDRESS in example
    # At the top level, as a reader would run it; a function defined there must find its neighbours.
    exec(compile(example.replace(ADDRESS, server.url), "docs/clients.md", "exec"), {"__name__": "__main__"})


def test_the_page_has_examples_of_every_client() -> None:
    text = "\n".join(EXAMPLES)
    for name in ("EnvClient", "RemoteEnv", "RemoteVectorEnv", "RemoteVerifier", "gymnasium.make"):
        assert name in text
