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


BOX = spaces.Box(-1, 1, (2,))
LONG = {
    "boxes": (spaces.Sequence(BOX), [0, 0.5]),
    "stacked boxes": (spaces.Sequence(BOX, stack=True), [0, 0.5]),
    "choices": (spaces.Sequence(spaces.MultiDiscrete([3, 3])), [1, 2]),
    "integers": (spaces.Sequence(spaces.Discrete(5)), 4),
    "texts": (spaces.Sequence(spaces.Text(3)), "abc"),
}


@pytest.mark.parametrize("kind", LONG)
def test_long_sequences_are_what_their_items_are(kind: str) -> None:
    space, item = LONG[kind]
    read = action_reader(space)
    action, written = read([item] * 3)
    assert action in space
    assert written == [item] * 3
    action, written = read([item] * 30_000)
    assert len(action) == len(written) == 30_000
    assert shape_of(action[-1]) == shape_of(read([item])[0][0])
    assert written[-1] == item
    for wrong in (7, [9, 9], [True, False], [0, "x"], None, {"__nd__": ["float32", [1], ""]}, "abcd"):
        with pytest.raises(ProblemError) as refused:
            read([item] * 30_000 + [wrong])
        assert refused.value.code == "invalid_action"
    with pytest.raises(ProblemError, match="too many items: at most 32768 "):
        read([item] * 33_000)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Sequence(spaces.Dict(a=BOX)),
        spaces.Dict(b=spaces.Tuple([spaces.Sequence(spaces.MultiBinary(2))])),
        spaces.OneOf([spaces.Discrete(2), spaces.Sequence(spaces.Sequence(spaces.Discrete(2)))]),
    ],
)
def test_items_that_are_looked_at_one_by_one_are_few(space: Space[Any]) -> None:
    items = {spaces.Sequence: [{"a": [0, 0]}], spaces.Dict: [[0, 1]], spaces.OneOf: [[1]]}[type(space)]

    def wire(count: int) -> Any:
        long = items * count
        return (
            long
            if type(space) is spaces.Sequence
            else {"b": [long]}
            if type(space) is spaces.Dict
            else [1, long]
        )

    action, written = action_reader(space)(wire(900))
    assert action in space
    assert written == wire(900)
    with pytest.raises(ProblemError, match="too many items: at most"):
        action_reader(space)(wire(1100))


@pytest.mark.parametrize("bad", [2.0, "NaN", float("inf"), [0.0], True])
def test_numbers_of_a_sequence_are_within_its_bounds(bad: Any) -> None:
    for space in (
        spaces.Sequence(BOX),
        spaces.Sequence(BOX, stack=True),
        spaces.Dict(a=spaces.Sequence(BOX)),
    ):
        wire: Any = [[0.0, 0.0], [0.0, bad]]
        with pytest.raises(ProblemError, match="invalid_action"):
            action_reader(space)({"a": wire} if isinstance(space, spaces.Dict) else wire)
