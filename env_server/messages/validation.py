"""The fields of a frame or a call: those of the envelope, and those of the request, checked against its model."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rollgym.clients.protocol.episode import PortableEpisode
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.values import DecodeError, EncodeError, decode_value, encode_value

_Model = TypeVar("_Model", bound=BaseModel)
_MAX_ERRORS = 20
_MAX_NAME = 100

ENVELOPE = frozenset({"id", "op", "session_id", "traceparent"})
"""Fields of a frame that are not the operation's own."""


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
