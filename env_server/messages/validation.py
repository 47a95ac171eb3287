"""Turning what pydantic says about a request into the protocol's problem."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from clients.protocol.errors import ProblemError

_Model = TypeVar("_Model", bound=BaseModel)
_MAX_ERRORS = 20
_MAX_NAME = 100


def validate(model: type[_Model], fields: Any) -> _Model:
    """Check a request against its model.

    Raises:
        ProblemError: `invalid_request`, with the fields and reasons in `errors`.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _problem(error) from None


def _problem(error: ValidationError) -> ProblemError:
    errors = [
        {"field": ".".join(str(part)[:_MAX_NAME] for part in item["loc"]), "reason": item["msg"]}
        for item in error.errors(include_url=False, include_context=False, include_input=False)[:_MAX_ERRORS]
    ]
    first = errors[0]
    where = f"{first['field']}: " if first["field"] else ""
    return ProblemError("invalid_request", f"{where}{first['reason']}", errors=errors)


def invalid(field: str, reason: str) -> ProblemError:
    """The problem that one field of a request is wrong."""
    field = field[:_MAX_NAME]
    return ProblemError("invalid_request", f"{field}: {reason}", errors=[{"field": field, "reason": reason}])
