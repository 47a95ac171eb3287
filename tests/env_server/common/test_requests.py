"""A long episode that is to be restored is validated as a short one is."""

from typing import Any

import pytest

from rollgym.clients.protocol.episode import PortableEpisode
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import RestoreRequest
from rollgym.env_server.common.requests import episode_of, restore_request, validate

_STEPS = 10_000


def _episode(steps: int = _STEPS, **fields: Any) -> dict[str, Any]:
    episode = {
        "env_id": "Count",
        "env_version": "7",
        "seed": 3,
        "reset_digest": "0" * 16,
        "actions": ["a", {"b": [1, 2.5, None]}] * (steps // 2),
        "digests": [f"{number:016x}" for number in range(steps)],
        "reseeds": [[number, 2**53 - 1] for number in range(steps)],
    }
    return {name: value for name, value in {**episode, **fields}.items() if value is not ...}


async def test_what_is_long_is_read_as_the_model_reads_it() -> None:
    fields = {"id": 7, "op": "restore", "episode": _episode(), "idle_timeout_s": 3, "request_id": "one"}
    asked = {name: value for name, value in fields.items() if name not in ("id", "op")}
    assert await restore_request(fields) == validate(RestoreRequest, asked)
    # Of those who ask, some write JSON alone.
    assert (await restore_request(fields)).episode.in_json() == validate(
        RestoreRequest, asked
    ).episode.model_dump(mode="json")


def _with(place: int, value: Any, name: str) -> dict[str, Any]:
    values = list(_episode()[name])
    values[place] = value
    return {name: values}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (_with(9_000, "no digest", "digests"), "episode.digests.9000"),
        (_with(0, 5, "digests"), "episode.digests.0"),
        (_with(4_096, [-1, 1], "reseeds"), "episode.reseeds.4096.0"),
        (_with(9_999, [9_999, 2**53], "reseeds"), "episode.reseeds.9999.1"),
        (_with(9_999, [0, 1], "reseeds"), "episode"),
        (_with(9_999, [10_001, 1], "reseeds"), "episode"),
        ({"digests": [], "actions": ["a"] * _STEPS}, "episode"),
        ({"digests": None}, "episode.digests"),
        ({"actions": "a"}, "episode.actions"),
        ({"seed": None, "reset_digest": None}, "episode"),
        ({"seed": ..., "reset_digest": ...}, "episode"),
        ({"seed": True}, "episode.seed"),
        ({"env_id": ...}, "episode.env_id"),
        ({"more": 1}, "episode.more"),
    ],
)
async def test_what_is_wrong_with_a_long_one_is_said_as_of_a_short_one(
    change: dict[str, Any], field: str
) -> None:
    fields = {"episode": _episode(**change)}
    with pytest.raises(ProblemError) as found:
        await restore_request(fields)
    with pytest.raises(ProblemError) as expected:
        validate(RestoreRequest, fields)
    assert found.value.to_problem()["errors"][0] == expected.value.to_problem()["errors"][0]
    assert found.value.to_problem()["errors"][0]["field"] == field


@pytest.mark.parametrize(
    "fields", [{}, {"episode": []}, {"episode": None}, {"episode": {"actions": [1] * 9_000}}]
)
async def test_what_is_no_episode_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ProblemError, match="episode"):
        await restore_request(fields)


async def test_what_a_node_answers_is_read_under_the_name_that_the_environment_has_here() -> None:
    for steps in (4, _STEPS):
        read = await episode_of(_episode(steps), "Here")
        assert read == PortableEpisode.model_validate({**_episode(steps), "env_id": "Here"})


@pytest.mark.parametrize(
    "answer",
    [
        {},
        _episode(digests=["no digest"] * _STEPS),
        _episode(actions=7),
        _episode(seed=True),
        _with(9, "x", "digests"),
    ],
)
async def test_what_is_no_episode_is_no_problem_of_who_asked(answer: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="this is no episode"):
        await episode_of(answer, "Here")
