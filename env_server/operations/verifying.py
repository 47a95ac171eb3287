"""Scoring responses without a session."""

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import VerifyRequest
from rollgym.clients.protocol.values import DecodeError, EncodeError, decode_value
from rollgym.env_server.access.context import Context
from rollgym.env_server.catalog.catalog import Catalog, CatalogEntry
from rollgym.env_server.common.metrics import Metrics
from rollgym.env_server.common.requests import invalid, requested
from rollgym.env_server.common.settings import ServerSettings
from rollgym.env_server.operations.runner import environment_error
from rollgym.env_server.sessions.replies import Reply, encode_given
from rollgym.env_server.workers.base import (
    EnvironmentRaised,
    OperationTimeout,
    ServerLost,
    Verdict,
    Worker,
    WorkerLost,
)

_OUTCOMES = frozenset({"correct", "wrong", "partial", "unparsable", "timeout", "error"})


class Verifying:
    """The handler of verify.

    Args:
        settings: Limits and time-outs.
        catalog: The verifiers.
        metrics: Counts verdicts.
        worker: Returns the worker of a verifier: a scoring that hangs costs one child process, which is replaced.
    """

    def __init__(
        self,
        settings: ServerSettings,
        catalog: Catalog,
        metrics: Metrics,
        worker: Callable[[CatalogEntry], Worker],
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._metrics = metrics
        self._worker = worker

    def verify(self, context: Context, fields: Mapping[str, Any]) -> Awaitable[Reply]:
        """Score items, each by itself, in their order."""
        env_id = fields.get("env_id")
        if type(env_id) is not str:
            raise invalid("env_id", "an environment id is needed, as text")
        entry = self._catalog.get(env_id)
        if not entry.stateless:
            raise ProblemError("not_stateless", f"{env_id} needs a session; it scores no single responses")
        request = requested(VerifyRequest, fields, "env_id")
        if len(request.items) > self._settings.max_batch:
            raise invalid("items", f"at most {self._settings.max_batch}")
        for number, item in enumerate(request.items):
            if type(item.get("response")) is not str:
                raise invalid(f"items.{number}.response", "a response is needed, as text")
        limit = self._settings.verify_timeout_s
        timeout = limit if request.timeout_s is None else min(limit, request.timeout_s)
        try:
            items = [decode_value(None, item) for item in request.items]
        except DecodeError as error:
            raise invalid("items", str(error)) from error
        return self._verify(context, entry, items, timeout)

    async def _verify(
        self, context: Context, entry: CatalogEntry, items: list[dict[str, Any]], timeout: float
    ) -> Reply:
        if not items:
            return {"results": []}
        try:
            worker = self._worker(entry)
            verdicts = await worker.verify(entry.source, items, timeout=timeout)
        except EnvironmentRaised as error:
            raise environment_error(error) from error
        except OperationTimeout as error:
            raise ProblemError("step_timeout", "the items were not scored in time") from error
        except ServerLost as error:
            raise ProblemError("upstream_error", str(error)) from error
        except WorkerLost as error:
            raise ProblemError(
                "env_error", "the verifier died", error_class="WorkerLost", message="the verifier died"
            ) from error
        results = []
        for verdict in map(_checked, verdicts):
            outcome = str(verdict["outcome"])
            self._metrics.verdicts[entry.label, outcome if outcome in _OUTCOMES else "other"] += 1
            try:
                results.append(encode_given(None, verdict, binary=context.binary))
            except EncodeError as error:
                results.append({"score": 0.0, "outcome": "error", "detail": str(error)})
        return {"results": results}


def _checked(verdict: Verdict) -> Verdict:
    """Return a verdict, or an error if its score is not a number that a trainer can use."""
    if math.isfinite(verdict["score"]):
        return verdict
    return {"score": 0.0, "outcome": "error", "detail": f"the verifier gave the score {verdict['score']}"}
