"""OpenEnv's client plays a real server: the program of docs/coming_from/openenv.md."""

import pytest

from tests.integrations.pages import blocks, run_block
from tests.support.client_server import ServerProcess


def test_openenvs_client_plays(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openenv", reason="it is installed by .ci/peers, in an environment of its own")
    (block,) = blocks("openenv.md")
    result = run_block(block.text, server)["result"]
    assert result.done
    assert result.reward == 1.0
