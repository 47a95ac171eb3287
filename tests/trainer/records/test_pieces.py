"""Tensors of which a rank holds boxes, written and read in pieces."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.records.pieces import (
    BoxedTensor,
    HeldBox,
    SavedPieces,
    boxes_of_stretch,
    read_pieces,
    write_pieces,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

WHOLE = torch.arange(24.0).view(4, 6)


def boxed(*boxes, copied=()):
    """The tensor of which these boxes are held: where each begins, and a view of memory."""
    return BoxedTensor(WHOLE.shape, [HeldBox(*box, box[0] in copied) for box in boxes])


def test_boxes_are_written_and_read_into_others(tmp_path):
    left, right, again = WHOLE[:, :2].clone(), WHOLE[:, 2:].clone(), torch.zeros(1, 2)
    write_pieces(
        tmp_path,
        {"a": boxed(((0, 0), left), ((0, 2), right), ((3, 4), again), copied=[(3, 4)])},
        {},
        first=True,
    )
    saved = SavedPieces(tmp_path)
    assert saved.shapes() == {"a": (4, 6)}
    assert torch.equal(saved.whole()["a"], WHOLE)
    memory = torch.full((30,), -1.0)
    upper, corner = memory[:11].view(1, 11)[:, :6], memory[20:26].view(2, 3)
    read_pieces(tmp_path, {"a": boxed(((1, 0), upper), ((2, 3), corner), copied=[(2, 3)])})
    assert torch.equal(upper, WHOLE[1:2])
    assert torch.equal(corner, WHOLE[2:, 3:])
    assert int((memory == -1.0).sum()) == 30 - 12
    read_pieces(tmp_path, {"a": boxed()})


@given(
    sizes=st.lists(st.integers(1, 4), max_size=4),
    ends=st.lists(st.integers(0, 256), min_size=2, max_size=2),
)
def test_stretches_are_boxes_in_the_order_of_their_numbers(sizes, ends):
    whole = torch.arange(prod(sizes)).view(sizes)
    start, stop = sorted(min(end, whole.numel()) for end in ends)
    found = list(boxes_of_stretch(sizes, start, stop))
    assert len(found) <= 2 * max(len(sizes), 1) - 1
    at = start
    for box in found:
        assert box.own.start == at
        there = tuple(slice(place, place + size) for place, size in zip(box.offset, box.sizes, strict=True))
        assert whole[there].flatten().tolist() == list(box.own)
        assert tuple(whole[there].shape) == box.sizes
        at = box.own.stop
    assert at == stop


def test_stretches_of_several_ranks_are_written_and_read_as_others(tmp_path):
    memory = torch.arange(24.0)
    parts = [
        BoxedTensor.of_stretch((2, 3, 4), start, memory[start:stop]) for start, stop in ((0, 7), (7, 24))
    ]
    write_pieces(
        tmp_path, {"a": BoxedTensor((2, 3, 4), [box for part in parts for box in part.held])}, {}, first=True
    )
    assert torch.equal(SavedPieces(tmp_path).whole()["a"], memory.view(2, 3, 4))
    held = torch.full((9,), -1.0)
    read_pieces(tmp_path, {"a": BoxedTensor.of_stretch((2, 3, 4), 13, held[:6])})
    assert held.tolist() == [13.0, 14.0, 15.0, 16.0, 17.0, 18.0, -1.0, -1.0, -1.0]


def test_boxes_that_overlap_are_not_taken_for_a_tensor(tmp_path):
    overlapping = boxed(((0, 0), WHOLE), ((3, 0), WHOLE[3:]))
    with pytest.raises(RuntimeError, match="overlapping chunks"):
        write_pieces(tmp_path, {"a": overlapping}, {}, first=True)


def test_numbers_of_all_boxes_are_looked_at():
    odd = WHOLE.clone()
    assert bool(boxed().finite())
    assert bool(boxed(((0, 0), odd[:2]), ((2, 0), odd[2:])).finite())
    odd[3, 5] = torch.nan
    assert not bool(boxed(((0, 0), odd[:2]), ((2, 0), odd[2:])).finite())
    with pytest.raises(TypeError, match="holds boxes"):
        boxed(((0, 0), odd)).sum()
