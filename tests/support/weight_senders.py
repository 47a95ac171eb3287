"""Backends whose weights are sent to servers."""

from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.torch_backend import Schedule, TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings


def backend_of(model):
    return TorchBackend(PolicyHead(model, 1.0), OptimizerSettings(), Schedule(1e-3, 0, 1, "constant"))
