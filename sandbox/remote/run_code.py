"""`POST /run_code` as data: requests and answers, with SandboxFusion's fields and some further ones.

A client that knows SandboxFusion only sees the fields it expects. The further fields preserve every limit, outcome and
byte.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollgym.sandbox.core.base import Guarantees, Language, Outcome, Program, RunResult
from rollgym.sandbox.core.limits import DEFAULT_LIMITS, Limits
from rollgym.sandbox.supervisor.files import plain_parts

_MOST_MEMORY_MB = 1 << 20
_MOST_SECONDS = 86_400.0

Seconds = Annotated[float, Field(gt=0, le=_MOST_SECONDS, allow_inf_nan=False)]


class RunCodeLimits(BaseModel):
    """Limits that SandboxFusion lacks; an unset one is the server's."""

    model_config = ConfigDict(extra="forbid", strict=True)

    cpu_seconds: Seconds | None = None
    pids: int | None = Field(None, ge=1, le=1024)
    disk_mb: int | None = Field(None, ge=1, le=4096)
    inodes: int | None = Field(None, ge=1, le=1 << 20)
    open_files: int | None = Field(None, ge=8, le=4096)
    output_kb: int | None = Field(None, ge=1, le=64 * 1024)
    compile_memory_mb: int | None = Field(None, ge=16, le=_MOST_MEMORY_MB)


class RunCodeRequest(BaseModel):
    """A program to run. `arguments`, `stdin_base64` and `limits` are ours."""

    model_config = ConfigDict(strict=True)

    code: str
    language: Language
    compile_timeout: Seconds = 10.0
    run_timeout: Seconds = 10.0
    memory_limit_MB: int = Field(-1, ge=-1, le=_MOST_MEMORY_MB, description="-1 is the server's default")  # noqa: N815
    stdin: str | None = None
    files: dict[str, str | None] = Field(default_factory=dict, description="Contents in base64, by path")
    fetch_files: list[str] = Field(default_factory=list)
    arguments: list[str] = Field(default_factory=list)
    stdin_base64: str | None = Field(None, description="Instead of `stdin`, where it is no text")
    limits: RunCodeLimits = RunCodeLimits()


class CommandRunResult(BaseModel):
    """The result of a compiler or of a program. The fields after `stderr` extend SandboxFusion's."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None
    return_code: int | None
    stdout: str
    stderr: str
    outcome: Outcome
    detail: str
    signal: int | None
    stdout_base64: str | None = Field(None, description="Where it is no UTF-8")
    stderr_base64: str | None = None
    stdout_truncated: bool
    stderr_truncated: bool
    cpu_seconds: float
    peak_memory_mb: float


class RunCodeReply(BaseModel):
    """How a run went. `outcome`, `detail` and `guarantees` are ours."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: str
    compile_result: CommandRunResult | None
    run_result: CommandRunResult | None
    executor_pod_name: str | None
    files: dict[str, str]
    outcome: Outcome
    detail: str
    guarantees: dict[str, str | bool] | None


class SandboxReply(BaseModel):
    """The guarantees of a server's sandbox, and the limits of requests."""

    guarantees: dict[str, str | bool]
    languages: list[str]
    limits: dict[str, float]


@dataclass(frozen=True, slots=True)
class RequestedRun:
    """A run that a sandbox must carry out."""

    program: Program
    files: Mapping[str, bytes]
    stdin: bytes
    limits: Limits
    collect: tuple[str, ...]


def build_request(
    program: Program, files: Mapping[str, bytes], stdin: bytes, limits: Limits, collect: Iterable[str]
) -> dict[str, Any]:
    """Return the body of a request for a run."""
    return {
        "code": program.source,
        "language": program.language,
        "arguments": list(program.arguments),
        "compile_timeout": limits.compile_seconds,
        "run_timeout": limits.wall_seconds,
        "memory_limit_MB": limits.memory_mb,
        "stdin_base64": _encode(stdin),
        "files": {name: _encode(content) for name, content in files.items()},
        "fetch_files": list(collect),
        "limits": {name: getattr(limits, name) for name in RunCodeLimits.model_fields},
    }


def read_request(request: RunCodeRequest) -> RequestedRun:
    """Parse a request into a run.

    Raises:
        ValueError: If it has content that is not base64, or a path that leads out of the working directory.
    """
    if request.stdin is not None and request.stdin_base64 is not None:
        raise ValueError("give stdin or stdin_base64, not both")
    if any("\0" in argument for argument in request.arguments):
        raise ValueError("an argument holds a null character")
    contents = {name: content for name, content in request.files.items() if content is not None}
    for name in (*contents, *request.fetch_files):
        plain_parts(name)
    stdin = (request.stdin or "").encode("utf-8", "surrogateescape")
    given = {name: value for name, value in request.limits.model_dump().items() if value is not None}
    if request.memory_limit_MB > 0:
        given["memory_mb"] = request.memory_limit_MB
    return RequestedRun(
        Program(request.language, request.code, tuple(request.arguments)),
        {name: _decode(f"the file {name}", content) for name, content in contents.items()},
        stdin if request.stdin_base64 is None else _decode("stdin_base64", request.stdin_base64),
        Limits(**{**_SERVER, **given, **_times(request)}),
        tuple(dict.fromkeys(request.fetch_files)),
    )


_SERVER = {field.name: getattr(DEFAULT_LIMITS, field.name) for field in fields(Limits)}


def _times(request: RunCodeRequest) -> dict[str, float]:
    return {"wall_seconds": request.run_timeout, "compile_seconds": request.compile_timeout}


def build_reply(result: RunResult, *, host: str | None) -> dict[str, Any]:
    """Return the body that answers with a result.

    Args:
        result: The result of the run.
        host: The name of the machine that has run it.
    """
    if result.outcome is Outcome.OK:
        status = "Success"
    else:
        status = "SandboxError" if result.outcome is Outcome.SANDBOX_ERROR else "Failed"
    ran = result.outcome is not Outcome.COMPILE_ERROR and result.guarantees is not None
    return {
        "status": status,
        "message": result.detail if status == "SandboxError" else "",
        "compile_result": None if result.compiling is None else _part(result.compiling),
        "run_result": _part(result) if ran else None,
        "executor_pod_name": host,
        "files": {name: _encode(content) for name, content in result.files.items()},
        "outcome": result.outcome.value,
        "detail": result.detail,
        "guarantees": None if result.guarantees is None else asdict(result.guarantees),
    }


def read_reply(body: Any) -> RunResult:
    """Return the result that a reply holds.

    Raises:
        ValueError: If it is not a reply of such a server.
    """
    reply = RunCodeReply.model_validate(body)
    compiling = None if reply.compile_result is None else _read_part(reply.compile_result)
    # If the compiler has failed, its output is the result.
    part = reply.run_result or reply.compile_result
    result = RunResult(outcome=reply.outcome) if part is None else _read_part(part)
    return replace(
        result,
        outcome=reply.outcome,
        detail=reply.detail,
        compiling=compiling,
        files={name: _decode(name, content) for name, content in reply.files.items()},
        guarantees=None if reply.guarantees is None else read_guarantees(reply.guarantees),
    )


def read_guarantees(body: Mapping[str, Any]) -> Guarantees:
    """Return the guarantees of a server's sandbox; members of a newer server are left out.

    Raises:
        ValueError: If some are missing.
    """
    known = {field.name for field in fields(Guarantees)}
    try:
        told = Guarantees(**{name: value for name, value in body.items() if name in known})
    except TypeError as error:
        raise ValueError(f"these are no guarantees: {error}") from error
    return replace(told, backend=f"remote({told.backend})")


def _part(result: RunResult) -> dict[str, Any]:
    status = "Finished"
    if result.outcome is Outcome.TIME_LIMIT:
        status = "TimeLimitExceeded"
    elif result.outcome is Outcome.SANDBOX_ERROR:
        status = "Error"
    code = result.exit_code
    if code is None and result.signal is not None and status == "Finished":
        code = -result.signal
    stdout, stderr = _text(result.stdout), _text(result.stderr)
    return {
        "status": status,
        "execution_time": result.wall_seconds,
        "return_code": code,
        "stdout": stdout,
        "stderr": stderr,
        "outcome": result.outcome.value,
        "detail": result.detail,
        "signal": result.signal,
        "stdout_base64": _unless_text(result.stdout, stdout),
        "stderr_base64": _unless_text(result.stderr, stderr),
        "stdout_truncated": result.stdout_truncated,
        "stderr_truncated": result.stderr_truncated,
        "cpu_seconds": result.cpu_seconds,
        "peak_memory_mb": result.peak_memory_mb,
    }


def _read_part(part: CommandRunResult) -> RunResult:
    return RunResult(
        outcome=part.outcome,
        exit_code=part.return_code if part.signal is None else None,
        signal=part.signal,
        stdout=_bytes(part.stdout, part.stdout_base64),
        stderr=_bytes(part.stderr, part.stderr_base64),
        stdout_truncated=part.stdout_truncated,
        stderr_truncated=part.stderr_truncated,
        wall_seconds=part.execution_time or 0.0,
        cpu_seconds=part.cpu_seconds,
        peak_memory_mb=part.peak_memory_mb,
        detail=part.detail,
    )


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _unless_text(data: bytes, text: str) -> str | None:
    return None if text.encode() == data else _encode(data)


def _bytes(text: str, encoded: str | None) -> bytes:
    return text.encode() if encoded is None else _decode("an output", encoded)


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _decode(what: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{what} is no base64") from error
