"""What tests of gateways share."""

from collections.abc import AsyncIterator

import pytest

from tests.support.gateway_players import Player


@pytest.fixture
async def players() -> AsyncIterator[list[Player]]:
    made: list[Player] = []
    yield made
    for player in made:
        await player.http.aclose()
