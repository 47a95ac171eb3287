"""A run's memory plan from its settings, before anything is built: as a table, with settings that would make it fit."""

import json
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollgym.trainer.config.backend import BackendSettings
from rollgym.trainer.config.model import HUB_NAME, LoraSettings, ModelSettings, gguf_file
from rollgym.trainer.config.optimizer import PlannedMicroBatch
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.config.supervised import DistillSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.memory_plan import (
    GIB,
    RUNTIME_BYTES,
    DeviceBytes,
    Engine,
    MemoryPlan,
    Part,
    Sharding,
    Training,
    engine_need,
    frozen_need,
    trained_need,
)
from rollgym.trainer.models.shape import KNOWN, ModelShape, tiny_config

_LAUNCHED_SHARE = 0.9
"""Fraction of its device's memory that a server takes by default (vLLM's own choice)."""
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
_SIZES = (32_768, 24_576, 16_384, 12_288, 8_192, 6_144, 4_096, 3_072, 2_048, 1_536, 1_024, 512, 256)
"""Tokens of a micro-batch that are tried. A device is busy with that many; more take memory, and save few launches."""
_USED = 0.9
"""Part of a device's memory that a plan may fill: it meets what is measured within a tenth."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A setting that makes a plan smaller.

    Attributes:
        setting: As a user writes it.
        peak: Bytes of a device with it, and with those before it.
        fits: Whether that is little enough.
    """

    setting: str
    peak: int
    fits: bool


def model_shape(model: ModelSettings) -> ModelShape:
    """Return the sizes of the run's model; nothing is fetched for it.

    Raises:
        ConfigError: If nothing here says what they are; the message has a remedy.
    """
    return ModelShape.from_config(model_config(model))


def model_config(model: ModelSettings) -> Mapping[str, Any]:
    """Return the config.json of the run's model; nothing is fetched for it.

    Raises:
        ConfigError: If it is not here; the message has a remedy.
    """
    if model.path is None:
        return tiny_config(model.hidden_size, model.layers, model.heads)
    return config_at(model.path)


def config_at(path: str) -> Mapping[str, Any]:
    """Return the config.json of a model's folder or GGUF file, or of a known or cached name on the hub.

    Raises:
        ConfigError: If it is not here, or cannot be read; the message has a remedy.
    """
    if path in KNOWN:
        return KNOWN[path]
    if (packed := gguf_file(path)) is not None:
        from rollgym.trainer.models.gguf import gguf_config  # Imported late: few plans need it.

        return gguf_config(packed)
    file = Path(path) / "config.json"
    if not file.exists():
        from huggingface_hub import try_to_load_from_cache  # Imported late: few plans need it.

        cached = try_to_load_from_cache(path, "config.json") if HUB_NAME.fullmatch(path) else None
        if not isinstance(cached, str):
            raise ConfigError(
                f"the sizes of {path} are not known here: fetch them with `hf download {path} config.json`"
            )
        file = Path(cached)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds no configuration of a model")
    return config


def sharding(settings: RunSettings, devices: Sequence[int] = ()) -> Sharding:
    """Return how the backend lays a model on devices.

    Args:
        settings: The run.
        devices: Those of the model's own ranks; empty: it is in the policy's.
    """
    backend = settings.backend
    own = len(devices) // backend.mesh.model_ranks
    return Sharding(
        backend.what.memory,
        data=own or backend.mesh.data or backend.data,  # what is not said follows from the ranks
        tensor=backend.mesh.tensor,
        pipeline=backend.mesh.pipeline,
        context=backend.mesh.context,
        expert=backend.mesh.expert,
        zero_stage=backend.zero_stage if "zero_stage" in backend.what.reads else 0,
        sequence_parallel=backend.sequence_parallel,
        offload=backend.cpu_offload,
    )


def memory_plan(settings: RunSettings, shape: ModelShape, device_bytes: int) -> MemoryPlan:
    """Return what the run needs of each device.

    Args:
        settings: The run.
        shape: Its model's sizes.
        device_bytes: Memory of a device.
    """
    laid = sharding(settings)
    number = 2 if settings.model.dtype == "bf16" else 4
    adapters = 0 if settings.model.lora is None else adapter_parameters(shape, settings.model.lora)
    training = Training(
        number_bytes=number,
        micro_batch_tokens=max(settings.optimizer.micro_batch_tokens, settings.model.max_length),
        checkpointing=settings.model.gradient_checkpointing,
        adapters=adapters,
        accelerator=settings.model.device != "cpu",
        moments=2 if settings.optimizer.keeps_averages else 0,
        # The value of `auto` differs from device to device: the plan has room for either.
        fused=settings.optimizer.fused is True,
    )
    roles = settings.cluster.roles
    other = OtherModels(settings, training, laid, device_bytes)
    need = trained_need(shape, replace(training, vocabulary_head=settings.reward is None), laid)
    policy = replace(need, activations=need.activations + other.beside.activations)
    parts = [Part("policy" if settings.reward is None else "reward", policy)]
    if settings.algorithm.critic is not None:
        own = sharding(settings, roles.critic.devices)
        need = trained_need(shape, replace(training, vocabulary_head=False), own)
        apart = _apart(settings, roles.critic.devices)
        parts.append(Part("critic", need, alone=bool(apart), devices=apart))
    if settings.algorithm.needs_reference:
        # Beside adapters the reference is the policy with them off.
        need = frozen_need(shape, training, sharding(settings, roles.reference.devices))
        need = DeviceBytes(activations=need.activations) if adapters else need
        apart = _apart(settings, roles.reference.devices)
        parts.append(Part("reference", need, alone=bool(apart), devices=apart))
    parts += other.parts
    parts += _engine(settings, shape, number, device_bytes)
    return MemoryPlan(tuple(parts), device_bytes, tuple(other.uncounted))


class OtherModels:
    """The models of a run that are other ones than its policy, each of a size of its own.

    Args:
        settings: The run.
        training: The training of the policy.
        laid: The sharding of a model over devices by its backend.
        device_bytes: Memory of a device.

    Attributes:
        beside: What those keep of a micro-batch that compute beside the policy, in its own forward.
        parts: The models.
        uncounted: Those whose sizes are not known here, and why.
    """

    def __init__(self, settings: RunSettings, training: Training, laid: Sharding, device_bytes: int) -> None:
        self.beside = DeviceBytes()
        self.parts: list[Part] = []
        self.uncounted: list[str] = []
        self._training, self._laid = training, laid
        if settings.distill is not None:
            self._add_teachers(settings.distill)
        if settings.dpo is not None and settings.dpo.reference not in (None, "none"):
            need = self._frozen("dpo.reference", str(settings.dpo.reference), laid)
            if need is not None:  # it is read before training starts, and freed then
                self.parts.append(Part("reference", need, sleeps=True))
        for name, judge in settings.cluster.roles.judges.items():
            shape = self._shape(f"cluster.roles.judges.{name}", judge.model)
            if shape is not None:
                reserved = int(_LAUNCHED_SHARE * device_bytes)
                server = Engine(2, 1, reserved_bytes=reserved, tensor=max(1, len(judge.devices)))
                self.parts.append(Part(name, engine_need(shape, server), alone=True))

    def _add_teachers(self, distill: DistillSettings) -> None:
        beside = distill.estimate != "sampled"
        for name, teacher in distill.teachers.items():
            if teacher.path is None:
                continue  # a server of its own
            need = self._frozen(
                f"distill.teachers.{name}", teacher.path, self._laid if beside else Sharding()
            )
            if need is None:
                continue
            if beside:
                # Each micro-batch goes through all of them, one after the other, while the student's is kept.
                most = max(self.beside.activations, need.activations)
                self.beside, need = DeviceBytes(activations=most), replace(need, activations=0)
            self.parts.append(Part(name, need))

    def _frozen(self, key: str, path: str, laid: Sharding) -> DeviceBytes | None:
        shape = self._shape(key, path)
        return None if shape is None else frozen_need(shape, self._training, laid)

    def _shape(self, key: str, path: str) -> ModelShape | None:
        try:
            return ModelShape.from_config(config_at(path))
        except ConfigError as error:
            self.uncounted.append(f"{key}: {error}")
            return None


def _apart(settings: RunSettings, devices: Sequence[int]) -> frozenset[int]:
    """The devices of a role, if the policy is trained on none of them."""
    trains = settings.cluster.roles.actor_train.devices or range(settings.backend.ranks)
    return frozenset() if set(devices) & set(trains) else frozenset(devices)


def _engine(settings: RunSettings, shape: ModelShape, number: int, device_bytes: int) -> list[Part]:
    """Return the engine's part of the plan; empty if servers run elsewhere already."""
    if not settings.plays:
        return []
    rollout, launch = settings.rollout, settings.inference.launch
    devices = settings.cluster.roles.actor_inference.devices
    if settings.inference.embedded:
        episodes = rollout.groups_per_step * (rollout.group_size + rollout.extra_members)
        episodes *= rollout.max_staleness + 1
        rows = min(rollout.max_concurrent_sequences, episodes)
        # Beside ranks, the driver's process has the policy once to speak of, and the engine once to draw from.
        copies = int(rollout.max_staleness > 0) if settings.backend.in_process else 2
        engine = Engine(number, copies, rows * settings.model.max_length, rows=rows)
        # With kind `local` it is in the driver's process, on the first device: the settings for a cluster do not count.
        apart = _apart(settings, devices if settings.cluster.kind == "ray" else ())
        need = engine_need(shape, engine)
        sleeps = settings.inference.sleep_level > 0  # then it has no weights of its own, which would stay
        return [Part("engine", need, alone=bool(apart), sleeps=sleeps, devices=apart)]
    if launch is None:
        return []
    share = launch.memory_fraction or _LAUNCHED_SHARE
    size = {"float32": 4, "auto": number}.get(settings.inference.dtype, 2)
    size = 1 if settings.inference.quantization == "fp8" else size
    server = Engine(size, 1, reserved_bytes=int(share * device_bytes), tensor=launch.tensor_parallel)
    sleeps = settings.inference.sleep_level > 0
    apart = _apart(settings, devices)
    alone = bool(apart) or (bool(launch.devices) and not sleeps)
    return [Part("engine", engine_need(shape, server), alone=alone, sleeps=sleeps, devices=apart)]


def adapter_parameters(shape: ModelShape, lora: LoraSettings) -> int:
    """Return how many parameters LoRA's adapters have; an upper bound if an expression names the layers."""
    sizes = {
        "q_proj": shape.hidden + shape.query_width,
        "k_proj": shape.hidden + shape.key_width,
        "v_proj": shape.hidden + shape.key_width,
        "o_proj": shape.query_width + shape.hidden,
        **dict.fromkeys(_FEED_FORWARD, shape.hidden + shape.feed_forward),
    }
    every = isinstance(lora.target_modules, str)
    named = sizes if every else [name for name in lora.target_modules if name in sizes]
    dense = shape.layers - shape.sparse_layers  # experts lie in one tensor, which has no adapters
    return lora.rank * sum(sizes[name] * (dense if name in _FEED_FORWARD else shape.layers) for name in named)


def planned_micro_batch(
    settings: RunSettings, shape: ModelShape, device_bytes: int, free: int
) -> PlannedMicroBatch:
    """Return the largest micro-batch that a device has room for, or the smallest size.

    Args:
        settings: The run.
        shape: Its model's sizes.
        device_bytes: Memory of a device.
        free: The part of it that is free.
    """
    sizes = [size for size in _SIZES if size > settings.model.max_length]
    # A row is never cut, and one of the longest has room wherever the smallest micro-batch has.
    sizes = [*sizes, max(settings.model.max_length, _SIZES[-1])]
    allowed = int(_USED * min(device_bytes, free))
    for tokens in sizes:
        plan = memory_plan(_with_tokens(settings, tokens), shape, device_bytes)
        peak = _trained_peak(plan)
        if peak <= allowed:
            break
    return PlannedMicroBatch(tokens, peak)


def _with_tokens(settings: RunSettings, tokens: int) -> RunSettings:
    optimizer = settings.optimizer.model_copy(update={"tokens_per_micro_batch": tokens})
    return settings.model_copy(update={"optimizer": optimizer})


def _trained_peak(plan: MemoryPlan) -> int:
    """Return the peak of the devices that compute in micro-batches; servers elsewhere do not count."""
    alone = [part.need.lasting + part.need.moment for part in plan.parts if part.alone and part.need.moment]
    return max(plan.peak, *(need + RUNTIME_BYTES for need in alone), 0)


def remedies(settings: RunSettings, shape: ModelShape, device_bytes: int) -> list[Remedy]:
    """Return settings that together make a plan fit, each with its total; the costliest ones last."""
    found: list[Remedy] = []
    before = memory_plan(settings, shape, device_bytes)
    for setting, changed in _changes(settings):
        settings = changed(settings)
        plan = memory_plan(settings, shape, device_bytes)
        if max(plan.peak, plan.peak_alone) < max(before.peak, before.peak_alone):
            found.append(Remedy(setting, max(plan.peak, plan.peak_alone), plan.fits))
            before = plan
        if plan.fits:
            break
    return found


SettingsChange = Callable[[RunSettings], RunSettings]


def _changes(settings: RunSettings) -> Iterator[tuple[str, SettingsChange]]:
    """Yield what makes a run smaller, cheap things first."""
    least = settings.model.max_length
    if not settings.model.gradient_checkpointing:
        yield "model.gradient_checkpointing=true", _with("model", gradient_checkpointing=True)
    if settings.optimizer.micro_batch_tokens > least:
        yield f"optimizer.tokens_per_micro_batch={least}", _with("optimizer", tokens_per_micro_batch=least)
    if settings.inference.embedded:
        shares = settings.backend.in_process and settings.cluster.kind == "local"
        if shares and not settings.inference.sleep_level and not settings.rollout.max_staleness:
            yield "inference.sleep_level=1", _with("inference", sleep_level=1)
        for rows in (64, 16):
            if settings.rollout.max_concurrent_sequences > rows:
                yield (
                    f"rollout.max_concurrent_sequences={rows}",
                    _with("rollout", max_concurrent_sequences=rows),
                )
    elif (
        settings.inference.launch is not None
        and not settings.inference.sleep_level
        and not settings.rollout.max_staleness
    ):
        yield "inference.sleep_level=1", _with("inference", sleep_level=1)
    if settings.model.dtype == "fp32":
        yield "model.dtype=bf16", _with("model", dtype="bf16")
    kind, adapters = settings.backend.what, _with("model", lora=LoraSettings())
    if "cpu_offload" in kind.reads and not settings.backend.cpu_offload:
        yield "backend.cpu_offload=true", _with("backend", cpu_offload=True)
    if settings.model.lora is None and not any(kind.refusals(adapters(settings))):
        yield "model.lora={}", adapters
    if settings.backend.in_process:
        for ranks in (2, 4, 8):
            backend = BackendSettings(kind="fsdp2", ranks=ranks)
            yield f"backend={{kind: fsdp2, ranks: {ranks}}}", _replaced(backend)


def _replaced(backend: BackendSettings) -> SettingsChange:
    return lambda settings: settings.model_copy(update={"backend": backend})


def _with(section: str, **values: object) -> SettingsChange:
    def change(settings: RunSettings) -> RunSettings:
        part = getattr(settings, section).model_copy(update=values)
        return settings.model_copy(update={section: part})

    return change


_ASSUMED_GB = 80


def device_memory(settings: RunSettings, given_gb: float | None) -> tuple[int, str]:
    """Return the bytes of a device, and in words what they are if they were not given."""
    if given_gb is not None:
        return int(given_gb * 1e9), ""
    if settings.model.device == "cpu":
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return size, f"{size / 1e9:.0f} GB is this machine's memory (model.device is cpu)"
    return int(_ASSUMED_GB * 1e9), f"{_ASSUMED_GB} GB a device is assumed, whatever this machine has"


_KINDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "cache": "keys and values",
    "activations": "activations",
    "workspace": "workspace",
    "host": "in host memory",
}
"""Names of the table's rows, by the attributes of `DeviceBytes`."""
_WIDTH, _LABEL, _COLUMN = 78, 18, 11


def plan_lines(settings: RunSettings, device_gb: float | None) -> list[str]:
    """Return the plan as lines of at most 78 columns.

    Args:
        settings: The run.
        device_gb: Memory of a device in 10^9 bytes; None: as `device_memory` has it, which the lines say.
    """
    name = settings.model.path or "the tiny policy"
    try:
        shape = model_shape(settings.model)
    except ConfigError as error:
        return textwrap.wrap(f"memory plan: none; {error}", _WIDTH)
    room, source = device_memory(settings, device_gb)
    if settings.model.device != "cpu":
        chosen = planned_micro_batch(settings, shape, room, room)
        settings = settings.model_copy(update={"optimizer": settings.optimizer.planned(chosen)})
    plan = memory_plan(settings, shape, room)
    title = f"memory plan: {name}, {shape.parameters.total / 1e9:.2f} billion parameters"
    lines = [*textwrap.wrap(title, _WIDTH), *textwrap.wrap(_how(settings, plan), _WIDTH), *_table(plan.parts)]
    lines += textwrap.wrap(_verdict(plan), _WIDTH)
    if source:
        lines += textwrap.wrap(f"{source}; name another in GB, such as --device-memory 24", _WIDTH)
    for said in plan.uncounted:
        lines += textwrap.wrap(f"not counted: {said}", _WIDTH)
    if not plan.fits:
        lines += _advice(remedies(settings, shape, plan.device_bytes))
    return lines


def _how(settings: RunSettings, plan: MemoryPlan) -> str:
    laid = sharding(settings)
    devices = f"{laid.devices} devices" if laid.devices > 1 else "1 device"
    return (
        f"backend {settings.backend.kind} on {devices} of {plan.device_bytes / 1e9:.0f} GB, {settings.model.dtype}, "
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
    kinds = [kind for kind in DeviceBytes.__slots__ if kind != "host"]
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
