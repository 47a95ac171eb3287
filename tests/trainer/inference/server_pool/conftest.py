"""Two servers and a pool of them."""

import asyncio

import pytest

from tests.support.pool_servers import Server, pool_of
from tests.support.tiny_models import WeightsOf, sharp_model


@pytest.fixture
def model():
    return sharp_model()


@pytest.fixture
def servers(model):
    return {"a": Server(model), "b": Server(model)}


@pytest.fixture
async def pool(servers, model):
    async with asyncio.timeout(60), pool_of(servers) as running:
        await running.sync(WeightsOf(model), 1)
        yield running
