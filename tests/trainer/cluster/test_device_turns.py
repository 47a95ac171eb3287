"""Models that share devices with whoever samples are there by turns."""

import pytest

from trainer.assembly.turns import DeviceTurns


class Model:
    """Notes where it is."""

    def __init__(self):
        self.moves = []

    def offload(self):
        self.moves.append("away")

    def onload(self):
        self.moves.append("here")


async def test_models_are_on_their_devices_while_they_are_used():
    models = [Model(), Model()]
    turns = DeviceTurns(models)
    await turns.leave()
    async with turns.resident():
        assert [model.moves for model in models] == [["away", "here"]] * 2
    assert [model.moves for model in models] == [["away", "here", "away"]] * 2


async def test_after_a_fault_nothing_is_asked_of_ranks_that_may_be_gone():
    model = Model()
    with pytest.raises(RuntimeError, match="gone"):
        async with DeviceTurns([model]).resident():
            raise RuntimeError("gone")
    assert model.moves == ["here"]
