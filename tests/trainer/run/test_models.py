"""Models that share devices with whoever samples are there by turns."""

import pytest

from rollgym.trainer.run.models import SharedDevices, TimeSharedModels


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
    turns = TimeSharedModels(models)
    await turns.leave()
    async with turns.resident():
        assert [model.moves for model in models] == [["away", "here"]] * 2
    assert [model.moves for model in models] == [["away", "here", "away"]] * 2


async def test_after_a_fault_nothing_is_asked_of_ranks_that_may_be_gone():
    model = Model()
    with pytest.raises(RuntimeError, match="gone"):
        async with TimeSharedModels([model]).resident():
            raise RuntimeError("gone")
    assert model.moves == ["here"]


def test_models_that_share_devices_are_there_by_turns():
    shared, policy, critic, reference = SharedDevices(), Model(), Model(), Model()
    for model, devices in ((policy, [0, 1]), (critic, [1, 2]), (reference, [3])):
        shared.make_room(devices)
        shared.add(model, devices)
    assert [model.moves for model in (policy, critic, reference)] == [["away"], [], []]
    for used in (policy, policy, critic, reference, policy):
        shared.bring(used)
    assert policy.moves == ["away", "here", "away", "here"]
    assert critic.moves == ["away", "here", "away"]
    assert reference.moves == [], "it shares with nobody"


async def test_models_that_take_turns_leave_for_whoever_samples_and_come_when_they_are_used():
    shared, policy, critic = SharedDevices(), Model(), Model()
    for model in (policy, critic):
        shared.make_room([0])
        shared.add(model, [0])
    turns = TimeSharedModels([shared])
    await turns.leave()
    async with turns.resident():
        assert [model.moves[-1] for model in (policy, critic)] == ["away", "away"], "nobody has used one yet"
        shared.bring(critic)
        assert critic.moves[-1] == "here"
    assert [model.moves[-1] for model in (policy, critic)] == ["away", "away"]
    assert policy.moves == ["away"]
