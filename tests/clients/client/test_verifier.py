"""RemoteVerifier scores in batches."""

from typing import Any

import pytest

from rollgym.clients.client.verifier import RemoteVerifier
from rollgym.clients.protocol.errors import ProblemError
from tests.support.client_server import ServerProcess


def item(response: str, word: str = "ice") -> dict[str, Any]:
    return {"response": response, "word": word}


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_verdicts_come_in_the_order_of_the_items(server: ServerProcess, encoding: Any) -> None:
    with RemoteVerifier(server.url, "Spelling-v0", encoding=encoding) as verifier:
        verdicts = verifier.score([item("ice"), item("ide"), item("raise"), item("")])
        assert [verdict.outcome for verdict in verdicts] == ["correct", "wrong", "error", "wrong"]
        assert verdicts[1].score == pytest.approx(2 / 3)
        assert verdicts[1].detail == {"right": 2}
        assert verifier.score([]) == []
    verifier.close()


def test_more_items_than_a_frame_may_hold_go_in_several(server: ServerProcess) -> None:
    words = [f"{number:04d}" for number in range(1500)]
    with RemoteVerifier(server.url, "Spelling-v0") as verifier:
        verdicts = verifier.score([item(word, words[0]) for word in words])
        assert [verdict.detail["right"] for verdict in verdicts] == [word.count("0") for word in words]
        long = "x" * 300_000
        assert [verdict.outcome for verdict in verifier.score([item(long, long)] * 5)] == ["correct"] * 5


def test_what_needs_a_session_scores_nothing(server: ServerProcess) -> None:
    with (
        RemoteVerifier(server.url, "Walk-v0") as verifier,
        pytest.raises(ProblemError, match="not_stateless"),
    ):
        verifier.score([item("ice")])
