"""One engine for a policy that is not trained: in this process, or a server that runs already."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from transformers import PreTrainedModel

from rollgym.trainer.config.inference import DialectName
from rollgym.trainer.inference.base import InferenceClient
from rollgym.trainer.inference.errors import WrongKeyError
from rollgym.trainer.inference.server_client import ServerClient
from rollgym.trainer.inference.torch_engine import TorchEngine

_MOST_ROWS = 64
"""Replies that the engine in this process draws at once."""


@asynccontextmanager
async def open_engine(
    model: PreTrainedModel, max_length: int, tokenizer: Any
) -> AsyncIterator[InferenceClient]:
    """Sample from a model in this process while the context is open.

    Args:
        model: The policy.
        max_length: Longest row in tokens.
        tokenizer: Its tokenizer.
    """
    async with TorchEngine(model, max_rows=_MOST_ROWS, max_length=max_length, tokenizer=tokenizer) as engine:
        yield engine


@asynccontextmanager
async def open_server(url: str, dialect: DialectName, key_variable: str) -> AsyncIterator[ServerClient]:
    """Sample from a server, whose weights stay unchanged, while the context is open.

    Args:
        url: The server's root.
        dialect: The server's API, vLLM's or SGLang's.
        key_variable: Environment variable with its API key, if it requires one.

    Raises:
        ConfigError: If the server lacks a required feature, or rejects the key.
        ServerGoneError: If the server does not answer.
    """
    client = ServerClient(url, dialect, way=None, api_key=os.environ.get(key_variable))
    try:
        await client.connect()
        yield client
    except WrongKeyError as error:
        raise WrongKeyError(f"{error}; set {key_variable}") from error
    finally:
        await client.close()
