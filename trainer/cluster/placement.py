"""Which process of which role has which devices. Pure: settings in, a plan or an error with its remedy out.

Device numbers count over all nodes: node n of k devices each has those from n * k to (n + 1) * k - 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError

ACTOR_TRAIN = "actor_train"
ACTOR_INFERENCE = "actor_inference"
REFERENCE = "reference"
CRITIC = "critic"

_WIDTH = 78  # `--dry-run` writes two more before it
_CELL = 4
_LONGEST_LABEL = 24


@dataclass(frozen=True, slots=True)
class Role:
    """A role and its processes.

    Attributes:
        name: The role's name in the settings.
        processes: The devices of each of its processes, in the order of their ranks.
        does: The task of its processes, for people: "rank", "engine", "server" or "judge".
        gives_way: Whether it leaves the memory of its devices to others while it does nothing.
    """

    name: str
    processes: tuple[tuple[int, ...], ...]
    does: str
    gives_way: bool = True

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices of the role, in the order of its processes."""
        return tuple(device for process in self.processes for device in process)


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of a run's roles.

    Attributes:
        kind: "local" or "ray".
        nodes: Machines.
        devices_per_node: Devices of each.
        roles: The roles, without those that a run does not have.
        environment: Description of the environments' workers, for people.
    """

    kind: str
    nodes: int
    devices_per_node: int
    roles: tuple[Role, ...]
    environment: str = ""

    def role(self, name: str) -> Role | None:
        """The role of that name; None if the run has none."""
        return next((role for role in self.roles if role.name == name), None)

    def node_of(self, device: int) -> int:
        """The node that a device is on."""
        return device // self.devices_per_node

    def index_on_node(self, device: int) -> int:
        """A device's number among those of its node."""
        return device % self.devices_per_node

    def used_nodes(self) -> list[int]:
        """The nodes that a role is on."""
        return sorted({self.node_of(device) for role in self.roles for device in role.devices})


def place_roles(settings: RunSettings) -> Placement:
    """Return the placement of a run's roles.

    Raises:
        ConfigError: If devices are missing, do not divide, or cannot be shared; the message names the remedy.
    """
    cluster = settings.cluster
    if cluster.kind == "ray" and ":" in settings.model.device:
        raise ConfigError(
            f"model.device '{settings.model.device}' names a device of one machine, and with cluster.kind 'ray' each "
            "process sees its own alone: leave the number out, and say in cluster.roles where roles are"
        )
    if cluster.kind == "ray" and settings.backend.in_process:
        raise ConfigError(
            "cluster.kind 'ray' trains in actors, and backend.kind 'torch' in the process of the driver: set "
            "backend.kind=fsdp2, which one rank is enough for, or cluster.kind=local"
        )
    roles = tuple(_roles(settings))
    largest = max(device for role in roles for device in role.devices)
    per_node = cluster.devices_per_node or -(-(largest + 1) // cluster.nodes)
    workers = cluster.roles.environment
    said = "processes beside the driver"
    if not settings.plays:
        said = "none: the run learns from examples"
    elif settings.env_url is not None:
        said = "servers that run already"
    elif workers is not None and cluster.kind == "ray":
        cpus = f"{workers.cpus:g} {'CPU' if workers.cpus == 1 else 'CPUs'}"
        said = f"up to {_count(workers.actors, 'actor')} of {cpus}"
    placement = Placement(cluster.kind, cluster.nodes, per_node, roles, said)
    check_placement(placement)
    if cluster.offload:
        _check_offload(settings, placement)
    if cluster.offload_models:
        _check_turns(settings, placement)
    return placement


def _check_turns(settings: RunSettings, placement: Placement) -> None:
    """Refuse `cluster.offload_models` if no two models share devices."""
    ranks = [role for role in placement.roles if role.does == "rank"]
    if settings.model.lora is not None:
        ranks = [role for role in ranks if role.name != REFERENCE]  # it is the policy, its adapters off
    if settings.backend.in_process or not any(
        set(one.devices) & set(other.devices) for one, other in combinations(ranks, 2)
    ):
        raise ConfigError(
            "cluster.offload_models has models of ranks that share devices be there by turns, and no two of this run's "
            "do: leave it out"
        )


def _check_offload(settings: RunSettings, placement: Placement) -> None:
    """Refuse `cluster.offload` if no engine shares the devices, or the models cannot be moved."""
    if settings.backend.in_process:
        raise ConfigError(
            "cluster.offload moves the models of ranks, and backend.kind 'torch' has none: leave it out, or set "
            "backend.kind=fsdp2"
        )
    samples = placement.role(ACTOR_INFERENCE)
    trained = {device for role in placement.roles if role.does == "rank" for device in role.devices}
    if samples is None or not trained & set(samples.devices):
        raise ConfigError(
            "cluster.offload makes room for whoever samples, who has devices of its own: leave it out, or give "
            "cluster.roles.actor_inference devices of actor_train"
        )
    if settings.rollout.max_staleness:
        raise ConfigError(
            f"cluster.offload lets ranks and whoever samples take turns, and rollout.max_staleness "
            f"{settings.rollout.max_staleness} has them work at once: set one of them to 0 or false"
        )


def _roles(settings: RunSettings) -> Iterator[Role]:
    named = settings.cluster.roles
    trains = _trainers(settings, named.actor_train.devices)
    yield Role(ACTOR_TRAIN, _one_each(trains), "rank")
    if settings.plays:
        yield from _inference(settings, trains)
    if settings.algorithm.needs_reference:
        yield _beside(settings, REFERENCE, named.reference.devices, trains)
    elif named.reference.devices:
        raise _unread(REFERENCE, "the algorithm has no KL penalty")
    if settings.algorithm.critic is not None:
        yield _beside(settings, CRITIC, named.critic.devices, trains)
    elif named.critic.devices:
        raise _unread(CRITIC, "the algorithm has no critic")
    for name, judge in named.judges.items():
        if not judge.devices:
            raise ConfigError(
                f"cluster.roles.judges.{name} names no devices: a judge has devices of its own, so that one that is "
                f"busy slows no other role; set cluster.roles.judges.{name}.devices"
            )
        yield Role(name, (tuple(judge.devices),), "judge", gives_way=False)


def _unread(role: str, why: str) -> ConfigError:
    return ConfigError(f"cluster.roles.{role}.devices: {why}, so nothing would be there: leave it out")


def _trainers(settings: RunSettings, devices: Sequence[int]) -> list[int]:
    """The devices of the ranks that train."""
    ranks = ranks_of(settings)
    if not devices:
        return list(range(ranks))
    if len(devices) != ranks:
        raise ConfigError(
            f"cluster.roles.actor_train.devices names {_count(len(devices), 'device')}, and backend.ranks is {ranks}: "
            "each rank has one device, so name as many, or change backend.ranks"
        )
    return list(devices)


def ranks_of(settings: RunSettings) -> int:
    """How many ranks train the policy."""
    return settings.backend.ranks


def _beside(settings: RunSettings, name: str, devices: Sequence[int], trains: Sequence[int]) -> Role:
    """A model in ranks of its own, or in those of the policy."""
    whole = settings.backend.mesh.model_ranks
    if devices and settings.backend.in_process:
        raise ConfigError(
            f"cluster.roles.{name}.devices names devices, and backend.kind 'torch' computes the {name} where it trains "
            "the policy: leave it out, or set backend.kind=fsdp2"
        )
    if len(devices) % whole:
        raise ConfigError(
            f"cluster.roles.{name}.devices names {_count(len(devices), 'device')}, and its layers are divided over "
            f"{whole} (backend.mesh): name a multiple of {whole}"
        )
    parts, expert = len(devices) // whole, settings.backend.mesh.expert
    if parts % expert:
        raise ConfigError(
            f"cluster.roles.{name}.devices names {_count(len(devices), 'device')}, which are {parts} of `data` "
            f"(backend.mesh), and experts are divided over {expert} of these: name a multiple of {whole * expert}"
        )
    if name == REFERENCE and settings.model.lora is not None and devices:
        raise _unread(REFERENCE, "with model.lora the reference is the policy itself, its adapters off")
    return Role(name, _one_each(devices or trains), "rank")


def _inference(settings: RunSettings, trains: Sequence[int]) -> Iterator[Role]:
    inference, devices = settings.inference, settings.cluster.roles.actor_inference.devices
    if inference.runs_already:
        if devices:
            named = "urls" if inference.urls else "urls_file"
            raise _unread(ACTOR_INFERENCE, f"inference.{named} names servers that run already")
        return
    launch = inference.launch
    if launch is None:
        if devices and "kind" not in settings.cluster.model_fields_set:
            raise _unread(
                ACTOR_INFERENCE, "cluster.kind is left out, and the engine is in the run's own process"
            )
        # With kind 'local' the engine is in the driver's process, and these settings for a cluster do not count.
        on_cluster = devices if settings.cluster.kind == "ray" else []
        yield Role(ACTOR_INFERENCE, _engines(settings, on_cluster or trains[:1]), "engine")
        return
    if not devices:
        if settings.cluster.kind == "ray":
            raise ConfigError(
                "inference.launch starts servers, and nothing says on which devices of the cluster: set "
                "cluster.roles.actor_inference.devices"
            )
        return  # on this machine inference.launch.devices says it, or the servers take what they see
    if launch.devices:
        raise ConfigError(
            "inference.launch.devices and cluster.roles.actor_inference.devices both say where servers are: leave "
            "inference.launch.devices out"
        )
    wanted = launch.count * launch.tensor_parallel
    if len(devices) != wanted:
        raise ConfigError(
            f"cluster.roles.actor_inference.devices names {_count(len(devices), 'device')}, and "
            f"{_count(launch.count, 'server')} of {_count(launch.tensor_parallel, 'device')} each need {wanted}: "
            + _servers_remedy(len(devices), launch.tensor_parallel)
        )
    each = launch.tensor_parallel
    groups = tuple(tuple(devices[start : start + each]) for start in range(0, wanted, each))
    gives_way = inference.sleep_level > 0 or launch.memory_fraction is not None
    yield Role(ACTOR_INFERENCE, groups, "server", gives_way=gives_way)


def _engines(settings: RunSettings, devices: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The devices of the embedded engines, one each."""
    if len(devices) > 1 and settings.deterministic:
        raise ConfigError(
            f"deterministic: true samples each batch as a whole, and cluster.roles.actor_inference.devices names "
            f"{len(devices)} devices with an engine each: name one"
        )
    return _one_each(devices)


def _servers_remedy(devices: int, tensor_parallel: int) -> str:
    if devices % tensor_parallel == 0:
        return f"set inference.launch.count to {devices // tensor_parallel}"
    return (
        f"{devices} cannot be divided into servers of {tensor_parallel}: name a multiple of it, or change "
        "inference.launch.tensor_parallel"
    )


def check_placement(placement: Placement) -> None:
    """Refuse what no cluster can do.

    Raises:
        ConfigError: If devices are not there, a process would be on two nodes, or roles cannot share a device.
    """
    _check_devices(placement)
    _check_sharing(placement)


def _check_devices(placement: Placement) -> None:
    """Refuse devices that nodes do not have, and processes that would be on two nodes."""
    there = placement.nodes * placement.devices_per_node
    for role in placement.roles:
        if beyond := [device for device in role.devices if device >= there]:
            raise ConfigError(
                f"{_key(role)} names device {beyond[0]}, and {_count(placement.nodes, 'node')} of "
                f"{_count(placement.devices_per_node, 'device')} {'have' if placement.nodes > 1 else 'has'} devices 0 "
                f"to {there - 1}: raise cluster.nodes or cluster.devices_per_node, or name others"
            )
        for number, process in enumerate(role.processes):
            nodes = sorted({placement.node_of(device) for device in process})
            if len(nodes) > 1:
                raise ConfigError(
                    f"{_key(role)}: {role.does} {number} would have devices of nodes {nodes[0]} and {nodes[1]} "
                    f"({', '.join(map(str, process))}), and its devices must be in one machine: order them so that "
                    "each group lies on one node"
                )


def _check_sharing(placement: Placement) -> None:
    """Refuse roles on one device that cannot leave it to each other."""
    for one, other in combinations(placement.roles, 2):
        shared = sorted(set(one.devices) & set(other.devices))
        if not shared:
            continue
        for role, beside in ((one, other), (other, one)):
            if role.does == "judge":
                raise ConfigError(
                    f"{_key(role)} shares device {shared[0]} with {_key(beside)}: a judge has devices of its own; "
                    "name others for one of them"
                )
        holds = next((role for role in (one, other) if not role.gives_way), None)
        if holds is not None:
            raise ConfigError(
                f"{_key(one)} and {_key(other)} share device {shared[0]}, and its servers would keep all of its "
                "memory: set inference.sleep_level to 1 or 2, so that they sleep while the policy is trained, or "
                "inference.launch.memory_fraction to the share that they may take, or name other devices"
            )


def _key(role: Role) -> str:
    return f"cluster.roles.{'judges.' if role.does == 'judge' else ''}{role.name}.devices"


def _one_each(devices: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple((device,) for device in devices)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def picture(placement: Placement) -> str:
    """Draw which process of each role has which device, in lines of at most 78 columns.

    A number is the rank of a process, a dot a device that the role does not have.
    """
    width = min(_LONGEST_LABEL, max(len(role.name) for role in placement.roles))
    at_once = (_WIDTH - width) // _CELL
    lines = [
        f"cluster: {placement.kind}, {_count(placement.nodes, 'node')} of "
        f"{_count(placement.devices_per_node, 'device')}"
    ]
    for node in placement.used_nodes():
        first = node * placement.devices_per_node
        for start in range(first, first + placement.devices_per_node, at_once):
            devices = range(start, min(start + at_once, first + placement.devices_per_node))
            if start > first and not any(set(role.devices) & set(devices) for role in placement.roles):
                continue
            lines += ["", _line(f"node {node}", width, map(str, devices))]
            for role in placement.roles:
                ranks = {device: rank for rank, process in enumerate(role.processes) for device in process}
                lines.append(_line(role.name, width, (str(ranks.get(device, ".")) for device in devices)))
    lines += ["", *(_sums(role, width) for role in placement.roles)]
    lines.append(f"{'environment':<{width}}  {placement.environment}")
    lines += _shared(placement)
    return "\n".join(lines)


def _line(label: str, width: int, cells: Iterator[str]) -> str:
    return f"{_short(label, width):<{width}}" + "".join(f"{cell:>{_CELL}}" for cell in cells)


def _short(label: str, width: int) -> str:
    return label if len(label) <= width else f"{label[: width - 1]}~"


def _sums(role: Role, width: int) -> str:
    each = len(role.processes[0])
    devices = f" of {each} devices" if each > 1 else ""
    return f"{_short(role.name, width):<{width}}  {_count(len(role.processes), role.does)}{devices}"


def _shared(placement: Placement) -> list[str]:
    """Describe for each pair of roles how many devices they share."""
    lines = []
    for one, other in combinations(placement.roles, 2):
        shared = set(one.devices) & set(other.devices)
        if shared:
            how = "all" if shared == set(one.devices) == set(other.devices) else f"{len(shared)}"
            both = " and ".join(_short(role.name, _LONGEST_LABEL) for role in (one, other))
            lines.append(f"{both} share {how} of their devices")
    return lines
