"""Errors between the trainer and an inference server; each kind requires a different reaction of the caller."""

from rollgym.trainer.core.errors import ConfigError, RunError


class InferenceError(RunError):
    """A server did not do what it was asked for."""


class ServerGoneError(InferenceError):
    """The server did not answer before the client's deadline. The request may go to another server."""


class RequestRefusedError(InferenceError):
    """The server refused this request, and would again; others it may well answer.

    Args:
        message: What it said.
        status: The HTTP status; 0 if it refused in the body of a success.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class StructuredOutputError(InferenceError):
    """The sampler cannot enforce the required form of a reply: the request is at fault, not the server.

    Args:
        message: What is wrong.
        request_id: The request, if known.
    """

    def __init__(self, message: str, request_id: str = "") -> None:
        super().__init__(message)
        self.request_id = request_id


class FailedReplyError(InferenceError):
    """A server aborted a reply with an error after starting it."""


class MalformedReplyError(InferenceError):
    """A reply breaks the server's contract: its content is discarded."""


class RepeatedAbortError(InferenceError):
    """The server aborted a reply again and again, although this client did not ask for it."""


class WeightsError(InferenceError):
    """The server's weights are not the run's: it must not be sampled from until a whole update has succeeded."""


class WeightUpdateError(WeightsError):
    """An update failed half way: which weights the server holds is undefined."""


class BroadcastGroupError(WeightUpdateError):
    """The group that carries weights to a server cannot be made: the server has none of the new ones."""


class WeightsLostError(WeightsError):
    """The server serves weights that this run did not send: it was restarted, or another client updates it."""


class ForeignWeightsError(WeightsLostError):
    """Another client sent the server weights after this run had: two runs cannot share it."""


class WeightsReleasedError(RunError):
    """Training has resumed: a server that has not taken a version yet, or was not verified, waits for the next one."""


class WrongWeightsError(WeightsError):
    """The server confirmed the weights, but its log-probabilities show that it does not use them."""


class ServerSetupError(ConfigError):
    """The server was started without something that the run needs; the message names the switch."""


class WrongKeyError(ServerSetupError):
    """The server wants an API key, and was given none or another one."""


class ServerTooOldError(ServerSetupError):
    """The server's release lacks something that the run needs; the message names the release that has it."""


class SharedServerError(RunError):
    """Another run keeps overwriting the server's weights with its own."""


class NoServerError(ConnectionError):
    """No inference server answers; the message gives the reason for each."""


GONE = (ConnectionError, TimeoutError, ServerGoneError, WeightsError)
"""What a client raises where its server does not answer, or not with this run's weights: not the request's fault, and
another server may do better."""


def words_of(error: BaseException) -> str:
    """Return an error's message, or the name of its class if the message is empty."""
    return str(error) or type(error).__name__
