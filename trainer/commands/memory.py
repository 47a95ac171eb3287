"""The memory plan of a run as a table: each part's memory on a device, and settings that would make it fit."""

import textwrap
from collections.abc import Sequence

from rollgym.trainer.assembly.memory import (
    Remedy,
    device_memory,
    memory_plan,
    model_shape,
    planned_micro_batch,
    remedies,
    sharding,
)
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.memory_plan import GIB, MemoryPlan, Need, Part

_KINDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "cache": "keys and values",
    "activations": "activations",
    "workspace": "workspace",
    "host": "in host memory",
}
"""Names of the table's rows, by the attributes of `Need`."""
_WIDTH, _LABEL, _COLUMN = 78, 18, 11


def plan_lines(settings: RunSettings, device_gb: float | None) -> list[str]:
    """Return the plan as lines of at most 78 columns.

    Args:
        settings: The run.
        device_gb: Memory of a device in 10^9 bytes; None: as `device_memory` has it.
    """
    name = settings.model.path or "the tiny policy"
    try:
        shape = model_shape(settings.model)
    except ConfigError as error:
        return textwrap.wrap(f"memory plan: none; {error}", _WIDTH)
    room = device_memory(settings, device_gb)
    if settings.model.device != "cpu":
        chosen = planned_micro_batch(settings, shape, room, room)
        settings = settings.model_copy(update={"optimizer": settings.optimizer.planned(chosen)})
    plan = memory_plan(settings, shape, room)
    title = f"memory plan: {name}, {shape.parameters.total / 1e9:.2f} billion parameters"
    lines = [*textwrap.wrap(title, _WIDTH), *textwrap.wrap(_how(settings, plan), _WIDTH), *_table(plan.parts)]
    lines += textwrap.wrap(_verdict(plan), _WIDTH)
    for said in plan.uncounted:
        lines += textwrap.wrap(f"not counted: {said}", _WIDTH)
    if not plan.fits:
        lines += _advice(remedies(settings, shape, plan.device_bytes))
    return lines


def _how(settings: RunSettings, plan: MemoryPlan) -> str:
    laid = sharding(settings)
    devices = f"{laid.devices} devices" if laid.devices > 1 else "1 device"
    return (
        f"backend {laid.kind} on {devices} of {plan.device_bytes / 1e9:.0f} GB, {settings.model.dtype}, "
        f"micro-batches of {settings.optimizer.micro_batch_tokens}"
    )


def _table(parts: Sequence[Part]) -> list[str]:
    lines = ["", f"{'GiB a device':<{_LABEL}}" + "".join(f"{_heading(part):>{_COLUMN}}" for part in parts)]
    for kind, label in _KINDS.items():
        sizes = [getattr(part.need, kind) for part in parts]
        if any(sizes):
            lines.append(f"{label:<{_LABEL}}" + "".join(f"{_gib(size):>{_COLUMN}}" for size in sizes))
    return lines


def _heading(part: Part) -> str:
    mark = "*" if part.alone else ""
    # One column is one space and the rest of its width.
    return f"{part.name[: _COLUMN - 1 - len(mark)]}{mark}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size else "-"


def _verdict(plan: MemoryPlan) -> str:
    own = f"; * on devices of their own: {plan.peak_alone / GIB:.1f}" if plan.peak_alone else ""
    told = f"at most {plan.peak / GIB:.1f} of {plan.device_bytes / GIB:.1f} GiB at one time{own}"
    if plan.fits:
        return f"{told}: fits"
    part, kind, size = largest(plan.parts)
    return f"{told}: DOES NOT FIT; largest: {part}, {_KINDS[kind]}, {size / GIB:.1f}"


def largest(parts: Sequence[Part]) -> tuple[str, str, int]:
    """Return the part and the kind that take most of a device, and how much."""
    kinds = [kind for kind in Need.__slots__ if kind != "host"]
    return max(
        ((part.name, kind, getattr(part.need, kind)) for part in parts for kind in kinds),
        key=lambda each: each[2],
    )


def _advice(found: Sequence[Remedy]) -> list[str]:
    if not found:
        return ["nothing that is a setting makes it smaller: take a smaller model or larger devices"]
    lines = ["what makes it smaller, one after the other:"]
    for index, remedy in enumerate(found):
        sign = "+ " if index else "  "
        end = "fits" if remedy.fits else ""
        lines.append(f"{sign}{remedy.setting:<52}{remedy.peak / GIB:>9.1f} GiB  {end}".rstrip())
    if not found[-1].fits:
        lines.append("and that is not enough: take more devices, larger ones, or a smaller model")
    return lines
