"""The double as an ASGI application, and its life."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from rollgym.trainer.inference.servers.sglang_server import TOKENS_KEPT_FREE
from tests.support.inference_server.control import Control
from tests.support.inference_server.engine import Engine
from tests.support.inference_server.faults import Faults
from tests.support.inference_server.http import Options
from tests.support.inference_server.models import HashModel, ServedModel
from tests.support.inference_server.sglang_routes import SglangRoutes
from tests.support.inference_server.texts import tokens_of
from tests.support.inference_server.vllm_routes import VllmRoutes
from tests.support.inference_server.weights import WeightUpdates

Dialect = Literal["vllm", "sglang"]
NEWEST = {"vllm": "0.33.0", "sglang": "0.5.23"}


@dataclass(frozen=True)
class Served:
    """What a double serves.

    Attributes:
        dialect: Whose routes it speaks.
        options: The switches.
        model: A folder in Hugging Face layout; None for the hash model.
        seed: Of the hash model's initial weights.
        max_length: Longest row; None for the model's own.
        max_rows: Rows that are decoded at once.
        step_s: Seconds that each decoding step takes at least.
        quantization: How the weights of a folder are rounded; None for not at all.
        log_file: Where every reply that ended is written down; None for nowhere.
    """

    dialect: Dialect
    options: Options
    model: Path | None = None
    seed: int = 0
    max_length: int | None = None
    max_rows: int = 256
    step_s: float = 0.0
    log_file: Path | None = None
    quantization: str | None = None


def _model(served: Served) -> ServedModel:
    if served.model is None:
        return HashModel(served.seed, max_length=served.max_length or HashModel.max_length)
    from tests.support.inference_server.hugging_face import HuggingFaceModel

    model = HuggingFaceModel(served.model, served.quantization)
    if served.max_length is not None:
        model.max_length = served.max_length
    elif served.dialect == "sglang":
        # As the docs say that it is to be started: with what it keeps free beyond the longest row.
        model.max_length += TOKENS_KEPT_FREE
    return model


def serve(served: Served, host: str, port: int) -> None:
    """Be the program that serves a folder, until this process is asked to end."""
    if served.model is None or not (served.model / "config.json").exists():
        sys.exit(f"{served.model} holds no model")
    # Programs that a run starts have its command line, which knows nothing of doubles.
    log = os.environ.get("ROLLGYM_DOUBLE_LOG")
    logged = replace(served, log_file=Path(log) if log else None)
    uvicorn.Server(uvicorn.Config(application(logged), host=host, port=port, log_level="warning")).run()


_KINDS = {"vllm": VllmRoutes, "sglang": SglangRoutes}


def routes_of_double(served: Served) -> list[str]:
    """The paths that a double has, but those of the double alone."""
    engine = Engine(_model(served))
    routes = _KINDS[served.dialect](engine, WeightUpdates(engine), tokens_of(served.model), served.options)
    return [route.path for route in routes.routes()]


def application(served: Served) -> Faults:
    """The double, faults before it."""
    engine = Engine(_model(served), max_rows=served.max_rows, step_s=served.step_s, log_file=served.log_file)
    updates = WeightUpdates(engine)
    tokens = tokens_of(served.model)
    routes = _KINDS[served.dialect](engine, updates, tokens, served.options)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.close()
        updates.close()

    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    app = Starlette(lifespan=lifespan, exception_handlers={ClientDisconnect: gone})
    faults = Faults(app)
    app.router.routes += [*routes.routes(), *Control(engine, updates, faults, tokens).routes()]
    return faults
