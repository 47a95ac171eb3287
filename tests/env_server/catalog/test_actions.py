"""What environments receive has the types that Gymnasium hands them."""

from typing import Any

import numpy as np
import pytest
from gymnasium import Space, spaces
from gymnasium.spaces import GraphInstance
from hypothesis import given
from hypothesis import strategies as st

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.values import encode_value
from rollgym.env_server.catalog.actions import action_reader
from tests.support.generated_spaces import SPACES


@given(SPACES, st.integers(0, 2**31))
def test_an_action_arrives_as_it_was_sampled(space: Space[Any], seed: int) -> None:
    space.seed(seed)
    sample = space.sample()
    action, written = action_reader(space)(wire := encode_value(space, sample, binary=False))
    assert shape_of(action) == shape_of(sample)
    assert written == wire
    assert action in space


def shape_of(value: Any) -> Any:
    """Everything that tells two values apart, types included; the order of keys, too."""
    if isinstance(value, GraphInstance):
        return [shape_of(part) for part in value]
    if isinstance(value, dict):
        return [(key, shape_of(part)) for key, part in value.items()]
    if isinstance(value, tuple):
        return tuple(shape_of(part) for part in value)
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tolist()
    return type(value), value


def test_what_a_journal_keeps_of_an_integer_is_a_plain_one() -> None:
    action, written = action_reader(spaces.Discrete(3, start=1))(2)
    assert (type(action), type(written)) == (np.int64, int)
    for wrong in (True, 2.0, 0, 4, "2", None, 10**30):
        with pytest.raises(ProblemError, match="integer from 1 to 3"):
            action_reader(spaces.Discrete(3, start=1))(wrong)
