"""The conformance probe: tests of a server before its environment is offered."""

import contextlib
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import orjson

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.values import EncodeError, encode_value
from rollgym.env_server.gateway.upstream.base import EnvironmentSpec, Upstream, UpstreamError
from rollgym.env_server.workers.base import EnvironmentRaised, OperationTimeout

_SEED = 20_240_229
_TIMEOUT_S = 30.0
# A server may have to start a container first.
_MAKE_TIMEOUT_S = 60.0
_Result = TypeVar("_Result")


class Check(NamedTuple):
    """One check of a probe; `detail` describes the failure."""

    check: str
    ok: bool
    detail: str = ""


class _Stop(Exception):  # noqa: N818 - never leaves this module
    """Stops the probe: no further test is possible."""


async def probe(upstream: Upstream, *, spec_only: bool = False) -> tuple[EnvironmentSpec, list[Check]]:
    """Test a server: request its spec, two resets with one seed, a step and the close.

    Args:
        upstream: The client of the server.
        spec_only: Request only the spec, because the rest was tested before.

    Returns:
        The spec of the environment, and the checks, all of which passed.

    Raises:
        ProblemError: `probe_failed`, with the `report`.
    """
    report: list[Check] = []
    try:
        spec = await _ask(report, "spec", upstream.spec())
        if spec_only:
            pass
        elif spec.stateless:
            await _probe_verifier(upstream, report)
        else:
            await _probe_episode(upstream, spec, report)
        found = await _ask(report, "connections", upstream.acquaint())
        if found is not None:
            report[-1] = Check("connections", True, found)
        else:
            report.pop()
    except _Stop:
        pass
    failed = [check for check in report if not check.ok]
    if failed:
        first = failed[0]
        raise ProblemError(
            "probe_failed",
            f"{first.check}: {first.detail}",
            report=[check._asdict() for check in report],
        )
    return spec, report


async def _probe_episode(upstream: Upstream, spec: EnvironmentSpec, report: list[Check]) -> None:
    """Two sessions, one after the other: some servers have room for no more than one."""
    # Probes of several environments may use one server at a time, which knows sessions by these names.
    one, two = (f"probe-{secrets.token_hex(8)}" for _ in range(2))
    first = await _in_session(upstream, one, report, lambda: _begin_and_step(upstream, one, spec, report))
    again = await _in_session(upstream, two, report, lambda: _begin(upstream, two, spec, report))
    agree = first == again
    report.append(
        Check("two resets with one seed agree", agree, "" if agree else "their observations differ")
    )


async def _in_session(
    upstream: Upstream, key: str, report: list[Check], play: Callable[[], Awaitable[_Result]]
) -> _Result:
    try:
        await _ask(report, "make", upstream.make(key, {}, timeout=_MAKE_TIMEOUT_S))
        result = await play()
    except _Stop:
        with contextlib.suppress(UpstreamError, EnvironmentRaised, OperationTimeout):
            await upstream.close(key)
        raise
    await _ask(report, "close", upstream.close(key))
    return result


async def _begin(upstream: Upstream, key: str, spec: EnvironmentSpec, report: list[Check]) -> bytes:
    observation, _ = await _ask(report, "reset", upstream.reset(key, _SEED, None, timeout=_TIMEOUT_S))
    return _written(report, spec, observation)


async def _begin_and_step(upstream: Upstream, key: str, spec: EnvironmentSpec, report: list[Check]) -> bytes:
    begin = await _begin(upstream, key, spec, report)
    spec.action_space.seed(_SEED)
    action = spec.action_space.sample()
    outcome = await _ask(report, "step", upstream.step(key, action, timeout=_TIMEOUT_S))
    _written(report, spec, outcome.observation)
    return begin


async def _probe_verifier(upstream: Upstream, report: list[Check]) -> None:
    verdicts = await _ask(report, "verify", upstream.verify([{"response": ""}], timeout=_TIMEOUT_S))
    report.append(Check("one verdict for one response", len(verdicts) == 1, f"{len(verdicts)} came"))


async def _ask(report: list[Check], check: str, call: Awaitable[_Result]) -> _Result:
    try:
        answer = await call
    except (UpstreamError, EnvironmentRaised, OperationTimeout, EncodeError) as error:
        report.append(Check(check, False, str(error)))
        raise _Stop from error
    report.append(Check(check, True))
    return answer


def _written(report: list[Check], spec: EnvironmentSpec, observation: Any) -> bytes:
    try:
        encoded = encode_value(spec.observation_space, observation, binary=False)
    except EncodeError as error:
        report.append(Check("observation fits its space", False, str(error)))
        raise _Stop from error
    fits = spec.observation_space.contains(observation)
    report.append(Check("observation fits its space", fits, "" if fits else f"{encoded!r:.200} is not in it"))
    return orjson.dumps(encoded, option=orjson.OPT_SORT_KEYS)
