"""Headers, lengths and bodies of HTTP, whatever a registered server or a server around ours lets through."""

from collections.abc import Awaitable, Callable

import pytest
from starlette.requests import ClientDisconnect, Request

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.common.negotiation import problem_answer, read_value


def test_no_member_of_a_foreign_problem_is_a_header_as_it_came() -> None:
    said = {"code": "method_not_allowed", "retry_after": 0.4, "allow": ["GET\r\nSet-Cookie: a=b", 3, "POST"]}
    answer = problem_answer(ProblemError.from_problem(said))
    assert (answer.headers["allow"], answer.headers["retry-after"]) == ("POST", "1")
    assert problem_answer(ProblemError.from_problem({"code": "method_not_allowed"})).status_code == 405


@pytest.mark.parametrize("length", ["\u00b2", "", "+3", 5000 * "0"])
async def test_a_length_that_says_nothing_is_not_looked_at(length: str) -> None:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"[1]", "more_body": False}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    assert await read_value(request, {"content-length": length}, 100) == [1]


async def test_a_length_beyond_all_bounds_is_too_large() -> None:
    request = Request({"type": "http", "method": "POST", "headers": []})
    with pytest.raises(ProblemError, match="too_large"):
        await read_value(request, {"content-length": 5000 * "9"}, 100)


def _in_parts(*messages: dict[str, object]) -> Callable[[], Awaitable[dict[str, object]]]:
    left = list(messages)

    async def receive() -> dict[str, object]:
        return left.pop(0)

    return receive


def _part(body: bytes, *, is_last: bool = False) -> dict[str, object]:
    return {"type": "http.request", "body": body, "more_body": not is_last}


POST = {"type": "http", "method": "POST", "headers": []}


async def test_a_body_is_all_of_its_parts() -> None:
    parts = _part(b"[1,"), _part(b""), _part(b" 2"), _part(b"]", is_last=True)
    assert await read_value(Request(POST, _in_parts(*parts)), {}, 6) == [1, 2]
    # A server around ours may leave out what is empty or the default.
    assert await read_value(Request(POST, _in_parts({"type": "http.request"})), {}, 6) == {}


async def test_a_body_without_a_length_is_read_up_to_the_limit() -> None:
    request = Request(POST, _in_parts(_part(b"[1,"), _part(b" 234")))
    with pytest.raises(ProblemError, match="too_large"):
        await read_value(request, {}, 6)


async def test_a_client_that_leaves_within_its_body_has_sent_none() -> None:
    request = Request(POST, _in_parts(_part(b"[1]"), {"type": "http.disconnect"}))
    with pytest.raises(ClientDisconnect):
        await read_value(request, {}, 6)
