"""Refusals in the shape of OpenAI's API, whose clients turn them into their own exceptions."""

from typing import Any


class ApiError(Exception):
    """A request that is refused.

    Args:
        status: HTTP status. Clients try 408, 409, 429 and 5xx again by themselves, and nothing else.
        message: The error and its remedy, for people.
        code: The error's code, for programs.
        param: The field that is meant.
    """

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    def as_body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code},
        }


def invalid(message: str, param: str | None = None) -> ApiError:
    """Return the refusal of a field that is malformed."""
    return ApiError(400, message, "invalid_value", param)


def unsupported(message: str, param: str) -> ApiError:
    """Return the refusal of what the API knows and this endpoint does not do."""
    return ApiError(400, message, "unsupported_value", param)
