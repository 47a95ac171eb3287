"""Recipes by which ranks make the small models of the tests; they are sent to other processes."""

from tests.support.tiny_models import sharp_model
from trainer.backends.fsdp2 import fsdp2_backend
from trainer.backends.heads import PolicyHead, ValueHead
from trainer.backends.optimizer import Schedule
from trainer.models.value_head import ValueModel

SCHEDULE = Schedule(1e-3, 0, 10, "constant")


def head_of(role: str, seed: int = 0):
    model = sharp_model(seed)
    return ValueHead(ValueModel(model)) if role == "critic" else PolicyHead(model, 1.0)


def make_fsdp2(group, backends, *, role, optimizer, options):
    return fsdp2_backend(head_of(role), group, optimizer, SCHEDULE, **options)
