"""Reading requests, with no transport and no state: their envelope, their fields, and long episodes.

The fields are those of a frame or a call, checked against the request's model. Episodes that come from elsewhere are
validated in slices of the event loop's time where they are long.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rollgym.clients.protocol.episode import Digest, PortableEpisode, Reseed
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.frames import dumps
from rollgym.clients.protocol.messages import RestoreRequest
from rollgym.clients.protocol.values import DecodeError, EncodeError, decode_value, encode_value
from rollgym.env_server.common.event_loop import SLICE_S

_Model = TypeVar("_Model", bound=BaseModel)
_MAX_ERRORS = 20
_MAX_NAME = 100

ENVELOPE = frozenset({"id", "op", "session_id", "traceparent"})
"""Fields of a frame that are not the operation's own."""

_MAX_ID_TEXT = 128
_MAX_ID = 2**53
_log = logging.getLogger(__name__)

FrameId = int | str | None
_MANY = 4096
_STRICT = ConfigDict(strict=True)
# Anything may be an action.
_LISTS: Mapping[str, TypeAdapter[list[Any]] | None] = {
    "actions": None,
    "digests": TypeAdapter(Annotated[list[Digest], Field(fail_fast=True)], config=_STRICT),
    "reseeds": TypeAdapter(Annotated[list[Reseed], Field(fail_fast=True)], config=_STRICT),
}


class Validated(dict[str, Any]):
    """The fields of a call, as they came; its route validates them.

    Attributes:
        request: The validated request, once it exists.
    """

    request: BaseModel | None = None


def requested(model: type[_Model], fields: Mapping[str, Any], *names: str) -> _Model:
    """The request in the fields of an operation, validated here unless a route has done so.

    Args:
        model: The request's model.
        fields: The operation's fields.
        *names: Fields beside the envelope's that are not the request's.

    Raises:
        ProblemError: `invalid_request`, with the fields and reasons in `errors`.
    """
    if isinstance(fields, Validated) and isinstance(fields.request, model):
        return fields.request
    return validate(model, _own(fields, names))


def refuse_fields(fields: Mapping[str, Any], *names: str) -> None:
    """Refuse fields of an operation that takes none but the envelope's and these.

    Raises:
        ProblemError: `invalid_request`.
    """
    for name in _own(fields, names):
        raise invalid(name, "this call has no such field")


def validate(model: type[_Model], fields: Any) -> _Model:
    """Check a request against its model.

    Raises:
        ProblemError: `invalid_request`, with the fields and reasons in `errors`.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise misfit_problem([(item["loc"], item["msg"]) for item in found]) from None


def misfit_problem(found: Sequence[tuple[Sequence[int | str], str]]) -> ProblemError:
    """The problem that a request does not fit its model.

    Args:
        found: The location of the error, and its reason.
    """
    errors = [
        {"field": ".".join(str(part)[:_MAX_NAME] for part in place), "reason": reason}
        for place, reason in found[:_MAX_ERRORS]
    ]
    first = errors[0]
    where = f"{first['field']}: " if first["field"] else ""
    return ProblemError("invalid_request", f"{where}{first['reason']}", errors=errors)


def invalid(field: str, reason: str) -> ProblemError:
    """The problem that one field of a request is wrong."""
    field = field[:_MAX_NAME]
    return ProblemError("invalid_request", f"{field}: {reason}", errors=[{"field": field, "reason": reason}])


def _own(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in ENVELOPE and name not in names}


def kwargs_in_json(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Kwargs in JSON's encoding, whatever encoding they came in: journals and other servers receive them.

    Raises:
        ProblemError: `invalid_kwargs`.
    """
    try:
        encoded: dict[str, Any] = encode_value(None, decode_value(None, kwargs), binary=False)
    except (DecodeError, EncodeError) as error:
        errors = [{"field": "kwargs", "reason": str(error)}]
        raise ProblemError("invalid_kwargs", f"kwargs: {error}", errors=errors) from error
    return encoded


def episode_in_json(episode: PortableEpisode) -> PortableEpisode:
    """A portable episode in JSON's encoding, as its format says, whatever encoding it came in.

    Raises:
        ProblemError: `invalid_request` or `invalid_kwargs`.
    """
    try:
        actions = encode_value(None, decode_value(None, episode.actions), binary=False)
        options = encode_value(None, decode_value(None, episode.options), binary=False)
    except (DecodeError, EncodeError) as error:
        raise invalid("episode", f"not as a portable episode is written: {error}") from error
    return episode.model_copy(
        update={"kwargs": kwargs_in_json(episode.kwargs), "options": options, "actions": actions}
    )


def frame_id(frame: Any) -> FrameId:
    """The id of a frame, or None if it has no valid id."""
    if type(frame) is dict:
        found = frame.get("id")
        if type(found) is int and 0 <= found < _MAX_ID:
            return found
        if type(found) is str and len(found) <= _MAX_ID_TEXT:
            return found
    return None


def bad_frame(frame: Any) -> ProblemError:
    """The problem that a frame has no envelope."""
    if type(frame) is not dict:
        return invalid("", "a frame must be an object")
    return invalid(
        "id", "every frame needs an id: an integer from 0 below 2**53, or text of at most 128 characters"
    )


def as_problem(error: Exception) -> ProblemError:
    """The problem to answer with; anything but a problem is a defect of the server, and goes to its log."""
    if isinstance(error, ProblemError):
        return error
    if isinstance(error, EncodeError):
        # This server's own answers were encoded before.
        return ProblemError("upstream_error", f"the answer of a registered server {error}")
    _log.error("an operation failed inside the server", exc_info=error)
    return ProblemError("internal", "the server failed; its log says more")


def sendable(problem: ProblemError, *, binary: bool) -> dict[str, Any]:
    """A problem as an object, without members of a registered server that a frame cannot hold."""
    content = problem.to_problem()
    try:
        # As deep as it stands in an answer: in the results of a batch.
        dumps([[[content]]], binary=binary)
    except EncodeError:
        return ProblemError(problem.code, "what more there was to say cannot be sent").to_problem()
    return content


async def restore_request(fields: Mapping[str, Any]) -> RestoreRequest:
    """The request that the fields of an operation are.

    Raises:
        ProblemError: `invalid_request`, with the fields and reasons in `errors`.
    """
    episode = fields.get("episode")
    if type(episode) is not dict:
        return requested(RestoreRequest, fields)
    given = {name: episode.get(name) for name in _LISTS}
    if not any(type(each) is list and len(each) > _MANY for each in given.values()):
        return requested(RestoreRequest, fields)
    lists = {name: each for name, each in given.items() if type(each) is list}
    short = {**fields, "episode": {**episode, **{name: [] for name in lists}}}
    request = requested(RestoreRequest, short)
    for name, values in lists.items():
        lists[name] = await _validated(name, values)
    whole = request.episode.model_copy(update=lists)
    try:
        whole.refuse_misfit()
    except ValueError as error:
        raise misfit_problem([(("episode",), f"Value error, {error}")]) from error
    return request.model_copy(update={"episode": whole})


async def episode_of(reply: Mapping[str, Any], env_id: str) -> PortableEpisode:
    """The portable episode that another server has answered with.

    Args:
        reply: The answer.
        env_id: What the environment is called here.

    Raises:
        ValueError: It is none.
    """
    try:
        request = await restore_request({"episode": {**reply, "env_id": env_id}})
    except ProblemError as problem:
        raise ValueError(f"this is no episode: {problem}") from problem
    return request.episode


async def long_episode_in_json(episode: PortableEpisode) -> PortableEpisode:
    """A portable episode in JSON's encoding; a long one is encoded in a thread.

    Raises:
        ProblemError: `invalid_request` or `invalid_kwargs`.
    """
    if len(episode.actions) < _MANY:
        return episode_in_json(episode)
    return await asyncio.to_thread(episode_in_json, episode)


async def _validated(name: str, values: list[Any]) -> list[Any]:
    form = _LISTS[name]
    if form is None:
        return values
    found: list[Any] = []
    end = perf_counter() + SLICE_S
    for first in range(0, len(values), _MANY):
        try:
            found += form.validate_python(values[first : first + _MANY])
        except ValidationError as error:
            raise _misfit(name, first, error) from error
        if perf_counter() >= end:
            await asyncio.sleep(0)
            end = perf_counter() + SLICE_S
    return found


def _misfit(name: str, first: int, error: ValidationError) -> ProblemError:
    """The problem with one of the values from an index on."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return misfit_problem(
        [
            (("episode", name, first + int(at), *rest), each["msg"])
            for each in found
            for at, *rest in [each["loc"]]
        ]
    )
