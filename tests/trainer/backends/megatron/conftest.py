"""What the tests of Megatron's ranks share."""

import pytest

from rollgym.trainer.backends.ranked import Ranks
from tests.support.forked_ranks import ForkedRanks
from tests.support.megatron_models import DEVICE, TENSOR


@pytest.fixture(scope="session")
def launched():
    """The two ranks of all tests of this folder: Megatron takes seconds to import."""
    held: list[Ranks] = []
    yield held
    for each in held:
        each.close()


@pytest.fixture
def ranks(launched, tmp_path_factory):
    """Two ranks; others where a call to the last ones failed."""
    if not launched or launched[-1].failed:
        started = Ranks(ForkedRanks(tmp_path_factory.mktemp("ranks")), TENSOR, DEVICE, 120.0)
        started.start()
        launched.append(started)
    launched[-1].mesh = TENSOR
    return launched[-1]
