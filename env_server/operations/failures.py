"""Failures of environments as problems that show no more than a client may see."""

import re

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.values import DecodeError, EncodeError
from rollgym.env_server.messages.validation import invalid
from rollgym.env_server.sessions.session import Running, Session
from rollgym.env_server.workers.base import EnvironmentRaised, NoWorker, OperationTimeout, OptionsRefused

# A name in a path may contain blanks if the path is quoted, or if another name follows; otherwise a blank ends it, or
# the words after a path would be taken for a part of it.
_NAME = r"[\w.@+~%$#,=-]+"
_PATHS = re.compile(
    r"file:/[^\s'\"]*"
    r"|(?<=['\"`])(?:~|[A-Za-z]:)?(?:[/\\][^/\\'\"`\n]{1,255}){1,64}[/\\]?(?=['\"`])"
    rf"|(?<![\w/:\\.])(?:~|[A-Za-z]:)?[/\\]{{1,2}}(?:{_NAME}(?: {_NAME}){{0,3}}[/\\]+){{1,64}}(?:{_NAME})?"
)
_MAX_MESSAGE = 500
_MOST_READ = 10_000


def environment_error(error: EnvironmentRaised | EncodeError | DecodeError) -> ProblemError:
    """The problem that an environment raised, or gave something that the wire has no form for.

    File paths are taken out of the message; the log has them. Options that it refuses are the client's fault.
    """
    if isinstance(error, EnvironmentRaised):
        error_class, message = error.error_class, error.message
    else:
        error_class, message = "ValueError", str(error)
    message = _PATHS.sub("<path>", message[:_MOST_READ])[:_MAX_MESSAGE]
    if isinstance(error, OptionsRefused):
        return invalid("options", f"the environment refuses them: {message}")
    return ProblemError("env_error", f"{error_class}: {message}", error_class=error_class, message=message)


def worker_died(env_id: str) -> ProblemError:
    """The problem that an operation took its worker down, each time it was tried."""
    return ProblemError(
        "env_error",
        f"the worker of {env_id} died",
        error_class="WorkerLost",
        message="the worker died",
    )


def not_in_time(detail: str, error: OperationTimeout) -> ProblemError:
    """The problem that an operation timed out; it says so if no worker was free to run it."""
    return ProblemError("step_timeout", f"{detail}: {error}" if isinstance(error, NoWorker) else detail)


def busy(running: Running) -> ProblemError:
    """The problem that another operation runs on the session."""
    return ProblemError("busy", f"a {running.kind} is running on this session", running=running.kind)


def episode_over(session: Session) -> ProblemError:
    """The problem that the episode has ended."""
    return ProblemError(
        "episode_over", f"episode {session.episode} ended at step {session.step}; reset the session"
    )


def not_reset(session: Session) -> ProblemError:
    """The problem that no episode runs."""
    if session.episode < 0:
        return ProblemError("not_reset", "the session was not reset yet")
    return ProblemError(
        "not_reset", f"episode {session.episode} broke off at step {session.step}; reset the session"
    )


def step_mismatch(session: Session, detail: str) -> ProblemError:
    """The problem that a step names another place than the session is at."""
    episode = session.episode if session.episode >= 0 else None
    return ProblemError("step_mismatch", detail, episode=episode, step=session.step)
