"""Small models that learn the same in one process and divided by Megatron-Core, and who divides them how."""

from importlib.util import find_spec

import pytest
import torch

from rollgym.trainer.backends.forward_pass import ForwardPass
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.rank_group import MeshShape
from rollgym.trainer.backends.ranked import RankedBackend
from rollgym.trainer.backends.reference import FrozenModel
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.learn.learner import Models
from tests.support.megatron_ranks import MegatronRecipe, family_head
from tests.support.sharded_models import WIDTH

needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="the extra [megatron] is not installed"
)

TENSOR = MeshShape(tensor=2)
DATA = MeshShape(data=2)
STAGES = MeshShape(pipeline=2)
CONTEXT = MeshShape(context=2)
EXPERTS = MeshShape(data=2, expert=2)
MESHES = {"tensor": TENSOR, "data": DATA, "stages": STAGES, "context": CONTEXT, "experts": EXPERTS}
DEVICE = "auto" if torch.cuda.device_count() >= 2 else "cpu"
"""Where there are GPUs for two ranks, they compute, and are compared with the processor."""


class Made:
    """Models that learn the same, here and in ranks.

    Args:
        ranks: The ranks; None for models in this process.
        mesh: How they share the work.
        in_pieces: Whether the ranks write checkpoints themselves.
    """

    def __init__(self, ranks, mesh, optimizer, rate, family="qwen3", *, in_pieces=False, **options):
        self._ranks, self._mesh, self._family, self._in_pieces = ranks, mesh, family, in_pieces
        self._optimizer, self._rate, self._options = optimizer, rate, options

    def recipe(self, role):
        return MegatronRecipe(self._mesh, self._family, role, self._optimizer, self._rate, self._options)

    def backend(self, role):
        if self._ranks is not None:
            self._ranks.mesh = self._mesh
            return RankedBackend(self._ranks, role, self.recipe(role), WIDTH, in_pieces=self._in_pieces)
        head = family_head(self._family, role)
        if role == "reference":
            return FrozenModel(ForwardPass(head, self._optimizer.micro_batch_tokens))
        options = {name: value for name, value in self._options.items() if name != "sequence_parallel"}
        return TorchBackend(head, self._optimizer, Schedule(self._rate, 0, 1, "constant"), **options)

    def models(self, settings):
        critic = self.backend("critic") if settings.critic is not None else None
        reference = self.backend("reference") if settings.needs_reference else None
        return Models(self.backend("policy"), critic, reference)
