"""Problems, messages, portable episodes and their digests."""

import pickle
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from pydantic import ValidationError

from rollgym.clients.protocol.episode import PortableEpisode, step_digest
from rollgym.clients.protocol.errors import CODES, ProblemError
from rollgym.clients.protocol.messages import MakeRequest, StepReply, StepRequest
from rollgym.clients.protocol.values import decode_value, encode_value
from tests.support.processes import ROOT


@pytest.mark.parametrize("code", CODES)
def test_a_problem_survives_the_wire_and_pickle(code: str) -> None:
    problem = ProblemError(code, "why", retry_after=1.5)
    for copy in (ProblemError.from_problem(problem.to_problem()), pickle.loads(pickle.dumps(problem))):
        assert (copy.code, copy.status, copy.detail, copy.extra) == (
            code,
            CODES[code],
            "why",
            {"retry_after": 1.5},
        )


@pytest.mark.parametrize("code", CODES)
def test_every_code_is_in_the_protocols_table(code: str) -> None:
    rows = [
        row
        for row in (ROOT / "docs" / "protocol_problems.md").read_text().splitlines()
        if row.startswith("| `")
    ]
    assert any(f"`{code}`" in row and str(CODES[code]) in row.split("|")[2] for row in rows)


def test_a_code_of_a_newer_server_is_kept_beside_internal() -> None:
    problem = ProblemError.from_problem({"code": "brand_new", "detail": "x", "status": 499})
    assert problem.code == "internal"
    assert problem.extra == {"unknown_code": "brand_new"}
    with pytest.raises(ValueError, match="brand_new"):
        ProblemError("brand_new", "x")


def test_digests_are_golden() -> None:
    assert step_digest("P__\n_O_", 0.0, False, False) == "e6e002ec5a492a34"
    assert step_digest([1, 2.5, "NaN"], 1, True, False) == "b8b06a09d0e4d1ff"
    assert step_digest({"b": 1, "a": [0]}, -0.1, False, True) == "0282c0f66599782b"
    assert step_digest({"a": [0], "b": 1}, -0.1, False, True) == "0282c0f66599782b"


@pytest.mark.parametrize("size", [4, 2000])
def test_a_digest_does_not_depend_on_the_encoding_of_the_frame(size: int) -> None:
    space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
    observation = np.linspace(-1, 1, size, dtype=np.float32)
    observation[1] = np.nan
    digests = {
        step_digest(encode_value(space, decode_value(space, wire), binary=False), 0.1, False, False)
        for wire in (encode_value(space, observation, binary=binary) for binary in (False, True))
    }
    assert len(digests) == 1


def test_requests_refuse_unknown_keys_and_replies_do_not() -> None:
    with pytest.raises(ValidationError, match="stap"):
        StepRequest.model_validate({"action": 1, "stap": 3})
    reply = {
        "observation": 1,
        "reward": 0,
        "terminated": False,
        "truncated": False,
        "info": {},
        "episode": 0,
        "step": 1,
    }
    assert StepReply.model_validate(reply | {"timing": {}}).step == 1


@pytest.mark.parametrize(
    "body",
    [
        {"env_id": "a/b"},
        {"env_id": ""},
        {"env_id": "A", "count": 0},
        {"env_id": "A", "reset": {"seed": -1}},
        {"env_id": "A", "reset": {"seed": 2**53}},
        {"env_id": "A", "reset": {"seed": 1.5}},
        {"env_id": "A", "reset": {"seed": True}},
        {"env_id": "A", "idle_timeout_s": 0},
        {"env_id": "A", "idle_timeout_s": float("inf")},
    ],
)
def test_bad_requests_to_make_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MakeRequest.model_validate(body)


def test_a_portable_episode_survives_json() -> None:
    episode = PortableEpisode(
        env_id="A-v0",
        env_version="1",
        kwargs={"size": 4},
        seed=2**53 - 1,
        reset_digest="0" * 16,
        actions=["Left", ""],
        digests=["a" * 16, "b" * 16],
    )
    assert PortableEpisode.model_validate_json(episode.model_dump_json()) == episode
    for other in (2, True, "1", 1.5, None):
        with pytest.raises(ValidationError):
            PortableEpisode.model_validate(episode.model_dump() | {"format": other})


@pytest.mark.parametrize("asked", [-1, float("nan"), float("inf"), 1e308, 10**400, True, "1", [1]])
def test_a_delay_that_nobody_can_have_meant_is_left_out(asked: object) -> None:
    received = {"code": "draining", "detail": "later", "retry_after": asked}
    assert ProblemError.from_problem(received).extra == {}
    assert ProblemError.from_problem(received | {"retry_after": 3.5}).extra == {"retry_after": 3.5}
