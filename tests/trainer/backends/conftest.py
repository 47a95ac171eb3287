"""What the tests of divided models share."""

import pytest

from tests.support.sharded_models import trained


@pytest.fixture(scope="module")
def trained_alone():
    """What models of one process learn, found once for all that is compared with it."""
    found = {}

    async def learn(made, preset, optimizer, steps):
        key = (preset, optimizer.kind, steps)
        if key not in found:
            found[key] = await trained(made, preset, steps)
        return found[key]

    return learn
