"""How much memory a run takes on each device, computed before anything is built. Pure arithmetic, no torch.

Bytes of the trained parts follow from the facts of the backends' layouts (`MemoryLayout`):

- `torch`: all of it on one device. In bf16 the optimizer has weights of its own in fp32 (4 bytes beside 2); gradients
  are kept in fp32, and AdamW has two numbers for each weight.
- `fsdp2`: weights, gradients and the optimizer's numbers in fp32, cut over the ranks; the weights of a layer and of the
  one that comes next are gathered in the type that is computed in. Tensor parallelism leaves embeddings, and what lies
  between the matrices of a layer, whole in each rank.
- `deepspeed`: stage 1 cuts the optimizer's numbers and its fp32 weights, stage 2 gradients too, stage 3 weights too
  (ZeRO, arXiv:1910.02054, section 3).
- `megatron`: layers cut by tensor and pipeline, experts by expert parallelism; 2 bytes for weights, 4 for gradients,
  and 12 over the data-parallel ranks (distributed optimizer).

Activations are what autograd keeps of a micro-batch in the layers of transformers' models, with flash or SDPA
attention, which keeps no scores. `tests/trainer/models/test_memory_plan.py` compares the plan with a measurement.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollgym.trainer.config.backend import BACKENDS_BY_NAME, MemoryLayout
from rollgym.trainer.models.shape import ModelShape

GIB = 2**30
LOGITS_AT_ONCE = 2**26
"""Numbers of logits that a policy holds at one time; more are computed in parts."""
RUNTIME_BYTES = 1 * GIB
"""Bytes of an accelerator's runtime, its kernels and the allocator's gaps, beside tensors."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model in training lies on devices.

    Attributes:
        layout: The facts of the back-end.
        data: Data-parallel ranks, over which what can be is cut.
        tensor: Devices that share every matrix.
        pipeline: Devices that share the layers.
        context: Devices that share the tokens of a row.
        expert: Devices that share the experts; they are part of `data`.
        zero_stage: What is cut over `data`, if the layout does not say it.
        sequence_parallel: Whether `tensor` shares what lies between the matrices of a layer, where the layout has that.
        offload: Whether the optimizer's state is in the host's memory, and the weights too if they are sharded.
    """

    layout: MemoryLayout = BACKENDS_BY_NAME["torch"].memory
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    zero_stage: int = 0
    sequence_parallel: bool = True
    offload: bool = False

    @property
    def stage(self) -> int:
        """What is cut over the data-parallel ranks: 0 nothing, 1 the optimizer, 2 gradients too, 3 weights too."""
        return self.zero_stage if self.layout.stage is None else self.layout.stage

    @property
    def ends(self) -> int:
        """Devices that share each of the embeddings, and its logits."""
        return self.tensor if self.layout.divides_ends else 1

    @property
    def between(self) -> int:
        """Devices that share what lies between the matrices of a layer."""
        return self.tensor if self.layout.divides_between and self.sequence_parallel else 1

    @property
    def devices(self) -> int:
        """Devices of one model in training."""
        return self.data * self.tensor * self.pipeline * self.context


@dataclass(frozen=True, slots=True)
class Training:
    """How a model is trained.

    Attributes:
        number_bytes: Bytes of the number format for computation: 4 or 2.
        micro_batch_tokens: Tokens of a micro-batch, padding included.
        checkpointing: Whether activations are computed once more for the gradient.
        adapters: Parameters of LoRA's adapters; 0 if all weights are trained.
        vocabulary_head: Whether it has logits (a policy) or one number for each token (a critic).
        accelerator: Whether it is on an accelerator: AdamW works on all weights at once there, which takes room.
        moments: Numbers that the optimizer keeps of each weight: AdamW two, SGD none.
        fused: Whether it takes a step in one kernel, which makes no intermediate numbers.
    """

    number_bytes: int = 4
    micro_batch_tokens: int = 16384
    checkpointing: bool = False
    adapters: int = 0
    vocabulary_head: bool = True
    accelerator: bool = True
    moments: int = 2
    fused: bool = False


@dataclass(frozen=True, slots=True)
class Engine:
    """The inference engine's part of the plan.

    Attributes:
        number_bytes: Bytes of a number, of weights and of keys and values.
        copies: Copies of the weights of its own: 0 if it reads those in training.
        cached_tokens: Tokens whose keys and values are kept at most.
        rows: Replies that are drawn at once, if this process draws them.
        reserved_bytes: Fixed bytes that a server reserves on the device; None if it takes what it needs.
        tensor: Devices that share its model.
    """

    number_bytes: int
    copies: int
    cached_tokens: int = 0
    rows: int = 0
    reserved_bytes: int | None = None
    tensor: int = 1


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes on each device, by what they are for.

    Attributes:
        weights: Weights, as they are computed with and as the optimizer has them.
        gradients: Gradients.
        optimizer: AdamW's two averages.
        activations: Bytes that a micro-batch keeps, logits included.
        workspace: Temporary bytes: gathered layers, the optimizer's intermediate numbers.
        cache: Keys and values of what is being sampled.
        host: In the memory of the host, and not of a device.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    workspace: int = 0
    cache: int = 0
    host: int = 0

    @property
    def lasting(self) -> int:
        """Bytes that stay allocated between steps."""
        return self.weights + self.optimizer + self.cache

    @property
    def moment(self) -> int:
        """Additional bytes during a step: a micro-batch and the optimizer's own work never overlap."""
        return self.gradients + max(self.activations, self.workspace)


@dataclass(frozen=True, slots=True)
class Part:
    """One model of a run, or its inference engine.

    Attributes:
        name: Its name: policy, critic, reference, engine, or by its own name a teacher or a judge.
        need: Its memory on each of its devices.
        alone: Whether these are other devices than the policy's.
        sleeps: Whether it leaves its memory to the others while they train.
        devices: Their numbers, if other parts that are `alone` may share them.
    """

    name: str
    need: DeviceBytes
    alone: bool = False
    sleeps: bool = False
    devices: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory that the parts of a run need on a device.

    Attributes:
        parts: The parts.
        device_bytes: Memory of a device.
        uncounted: Models that are not among the parts, and why.
    """

    parts: tuple[Part, ...]
    device_bytes: int
    uncounted: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """The most that is used of the policy's devices, at any time of a step."""
        return _peak([part for part in self.parts if not part.alone])

    @property
    def peak_alone(self) -> int:
        """The peak on the other devices; 0 if there are none."""
        alone = [part for part in self.parts if part.alone]
        return max(
            (
                _peak([each for each in alone if each is part or each.devices & part.devices])
                for part in alone
            ),
            default=0,
        )

    @property
    def fits(self) -> bool:
        """Whether the devices have room for everything."""
        return max(self.peak, self.peak_alone) <= self.device_bytes


def _peak(together: Sequence[Part]) -> int:
    """Return the most that parts use of devices that they share."""
    stays = sum(part.need.lasting for part in together if not part.sleeps)
    sleepers = sum(part.need.lasting + part.need.moment for part in together if part.sleeps)
    # Models compute in turns.
    moment = max((part.need.moment for part in together if not part.sleeps), default=0)
    return stays + max(moment, sleepers) + RUNTIME_BYTES


@dataclass(frozen=True, slots=True)
class _Group:
    """Parameters that are held alike: `held` on each device, sharded further over `ranks` if the backend shards."""

    held: int
    ranks: int


def trained_need(shape: ModelShape, training: Training, sharding: Sharding) -> DeviceBytes:
    """Return what a model in training needs of each of its devices."""
    groups = _groups(shape, sharding, training.vocabulary_head)
    states = [_states(group, training, sharding) for group in groups]
    if training.adapters:
        states.append(_adapters(training, sharding))
    need = DeviceBytes(
        weights=sum(each.weights for each in states),
        gradients=sum(each.gradients for each in states),
        optimizer=sum(each.optimizer for each in states),
        host=sum(each.host for each in states),
    )
    # On an accelerator torch's AdamW goes over all weights at once, with one more number for each.
    at_once = training.accelerator and not training.fused and sharding.layout.steps_at_once
    workspace = need.optimizer // 2 if at_once else 0
    gathered = _gathered_bytes(shape, training, sharding)
    activations = activation_bytes(shape, training, sharding) + gathered
    return replace(need, activations=activations, workspace=workspace)


def frozen_need(shape: ModelShape, training: Training, sharding: Sharding) -> DeviceBytes:
    """Return what a model needs that is only read: a reference policy."""
    groups = _groups(shape, sharding, head=True)
    cut = sharding.stage == 3
    held = sum(group.held // (group.ranks if cut else 1) for group in groups) * training.number_bytes
    tokens = training.micro_batch_tokens // sharding.context
    # Without gradient a layer's tensors are freed as soon as the next one has what it needs.
    layer = _kept_per_token(shape, training, sharding) * tokens
    logits = _logit_bytes(shape, training, sharding, training.micro_batch_tokens)
    return DeviceBytes(
        weights=held, activations=max(layer, logits) + _gathered_bytes(shape, training, sharding)
    )


def engine_need(shape: ModelShape, engine: Engine) -> DeviceBytes:
    """Return the bytes that the engine needs on each of its devices."""
    weights = engine.copies * shape.parameters.total * engine.number_bytes // engine.tensor
    cache = shape.cache_numbers_per_token * engine.number_bytes * engine.cached_tokens // engine.tensor
    if engine.reserved_bytes is not None:
        cache = max(engine.reserved_bytes - weights, 0)
    # Logits as they are, and in fp32 as they are scaled, sorted or drawn from.
    logits = engine.rows * shape.vocabulary * (engine.number_bytes + 12)
    return DeviceBytes(weights=weights, cache=cache, activations=logits)


def activation_bytes(shape: ModelShape, training: Training, sharding: Sharding) -> int:
    """Return what autograd keeps of a micro-batch on a device, its logits included."""
    tokens = -(-training.micro_batch_tokens // sharding.context)
    layers = -(-shape.layers // sharding.pipeline)
    layer = _kept_per_token(shape, training, sharding) * tokens
    logits = _logit_bytes(shape, training, sharding, tokens) if training.vocabulary_head else 0
    if training.checkpointing:
        kept = layers * shape.hidden * training.number_bytes * tokens // sharding.between
        # Layers are recomputed one at a time, after the logits are freed.
        return kept * sharding.pipeline + max(layer, logits)
    # A pipeline's first stage has a micro-batch in flight for each stage.
    return layers * layer * sharding.pipeline + logits


def _groups(shape: ModelShape, sharding: Sharding, head: bool) -> list[_Group]:
    """Divide what a device holds: what every data-parallel rank has, and experts, of which each has some."""
    parts = shape.parameters
    output = parts.head if head else 0
    # The first stage has the embedding and the last one the head: the larger of them counts.
    ends = parts.embedding + output if sharding.pipeline == 1 else max(parts.embedding, output)
    layers = parts.dense - parts.embedding - parts.head
    ranks = sharding.data * sharding.context
    dense = layers // sharding.pipeline // sharding.tensor + ends // sharding.ends
    experts = parts.experts // (sharding.pipeline * sharding.tensor * sharding.expert)
    return [_Group(dense, ranks), _Group(experts, max(1, ranks // sharding.expert))]


def _states(group: _Group, training: Training, sharding: Sharding) -> DeviceBytes:
    """Return what a group takes between micro-batches: in full if it is trained, else the weights alone."""
    number, held, layout = training.number_bytes, group.held, sharding.layout
    cut = [1, *(group.ranks if sharding.stage >= least else 1 for least in (1, 2, 3))]
    if training.adapters:
        return DeviceBytes(weights=number * held // cut[3])
    # Weights in fp32 beside those that are computed with. FSDP2 gathers the latter out of the former; DeepSpeed has
    # fp32 copies of its own even of fp32 weights.
    copied = layout.weights == "copied" or (layout.weights == "computed" and number < 4)
    masters = 4 * held if copied else 0
    weights = (4 if layout.weights == "fp32" else number) * held // cut[3]
    gradients = (number if layout.gradients_as_computed else 4) * held // cut[2]
    optimizer = 4 * training.moments * held // cut[1]
    if sharding.offload and layout.offloads_all:
        return DeviceBytes(host=weights + gradients + optimizer)
    if sharding.offload:
        cut_weights = weights if cut[3] > 1 else 0
        return DeviceBytes(
            weights - cut_weights, gradients, 0, host=optimizer + masters // cut[1] + cut_weights
        )
    return DeviceBytes(weights + masters // cut[1], gradients, optimizer)


def _adapters(training: Training, sharding: Sharding) -> DeviceBytes:
    """Return what adapters take, which are in fp32 and trained."""
    ranks = sharding.data * sharding.context if sharding.stage else 1
    held = 4 * training.adapters // ranks
    return DeviceBytes(weights=held, gradients=held, optimizer=training.moments * held)


def _gathered_bytes(shape: ModelShape, training: Training, sharding: Sharding) -> int:
    """Return what weights take that are gathered from all ranks: a layer, the next one, and the embeddings."""
    if sharding.stage < 3 or sharding.data * sharding.context == 1:
        return 0
    parts = shape.parameters
    ends = (parts.embedding + (parts.head if training.vocabulary_head else 0)) // sharding.ends
    layer = (parts.total - parts.embedding - parts.head) // shape.layers // sharding.tensor
    gradients = 0 if training.adapters else ends + layer
    return training.number_bytes * (ends + 2 * layer + gradients)


def _kept_per_token(shape: ModelShape, training: Training, sharding: Sharding) -> int:
    """Return the bytes that autograd keeps of a token in one layer on a device; the mean over layers if they differ.

    Norms compute in fp32: they keep their input in fp32, the normalised input, and their result, which the next
    projection keeps. Attention keeps queries, keys, values and its output, once as it is and once in the order that the
    output projection reads. A gated feed-forward keeps four tensors of its width: gate, its activation, up, their
    product.
    """
    number, hidden = training.number_bytes, shape.hidden
    norms = shape.norms_per_layer * hidden * (4 + 2 * number)
    attention = number * (3 * shape.query_width + 2 * shape.key_width)
    if shape.norms_of_heads:
        attention += (4 + number) * (shape.query_width + shape.key_width)
    dense = 4 * number * shape.feed_forward
    # Each token is there once for each of its experts: what goes in, what comes out, and what lies between.
    routed = number * shape.experts_per_token * (4 * shape.expert_width + 2 * hidden) + 12 * shape.experts
    feed_forward = (
        dense * (shape.layers - shape.sparse_layers) + routed * shape.sparse_layers
    ) // shape.layers
    return norms // sharding.between + (attention + feed_forward) // sharding.tensor


def _logit_bytes(shape: ModelShape, training: Training, sharding: Sharding, tokens: int) -> int:
    """Return what logits take: as many as are held at once, as they are, and four times in fp32 on the way back."""
    vocabulary = shape.vocabulary // sharding.ends
    return min(tokens * vocabulary, LOGITS_AT_ONCE) * (training.number_bytes + 16)
