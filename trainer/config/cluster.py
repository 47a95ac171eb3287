"""Settings for the placement of a run's roles: on which devices, in processes of this machine or on a Ray cluster."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, field_validator, model_validator

from rollgym.trainer.core.strict import Count, Seconds, Settings, UserPath

_LARGEST_DEVICE = 65_535
_MOST_SHOWN = 40
_SPAN = re.compile(r"\s*([0-9]{1,5})\s*(?:-\s*([0-9]{1,5})\s*)?")


def parse_devices(value: Any) -> Any:
    """Return the device numbers that a user wrote as a number, a range such as `0-3`, or a list of both.

    Args:
        value: `5`, `"0-3"`, `"0-3,6"` or `[0, "2-3"]`; ranges include their ends.

    Raises:
        ValueError: If it is not one of these.
    """
    if isinstance(value, bool):
        raise ValueError("a truth value is no device: write their numbers, such as [0, 1] or 0-3")
    parts: list[Any] = value.split(",") if isinstance(value, str) else value
    if not isinstance(value, list | tuple | str):
        parts = [value]
    return [number for part in parts for number in _span(part)]


def _span(part: Any) -> range:
    """The devices of one number or range."""
    found = _SPAN.fullmatch(str(part)) if type(part) in (int, str) else None
    if found is None:
        shown = repr(part)[:_MOST_SHOWN]
        raise ValueError(f"{shown} is no device and no range of them: write [0, 1], 0-3, or [0, 4-7]")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise ValueError(f"the range {part} runs backwards: write {last}-{first}")
    if last > _LARGEST_DEVICE:
        raise ValueError(f"device {last} is larger than any that there is")
    return range(first, last + 1)


Devices = Annotated[list[int], BeforeValidator(parse_devices)]
"""Device numbers: node n of k devices each has those from n * k on."""


class RoleSettings(Settings):
    """The machines and devices of one role."""

    devices: Devices = Field(
        [],
        description="Devices, numbered over all nodes: [0, 1], 0-3, or both as [0, 4-7]. If absent: those of "
        "actor_train, and for actor_train itself the first ones, one for each rank.",
    )

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if twice := sorted({number for number in self.devices if self.devices.count(number) > 1}):
            raise ValueError(f"devices names {twice[0]} twice: each device holds one process of a role")
        return self


class JudgeSettings(RoleSettings):
    """A judge on devices of its own: a server that is started for it, and its own queue of verdicts."""

    model: UserPath = Field(min_length=1, description="Folder or name of the model that judges.")
    command: list[Annotated[UserPath, Field(min_length=1)]] = Field(
        min_length=1,
        description="Program that serves it by OpenAI's API, such as [vllm, serve, '{model}', --port, '{port}']: "
        "{model}, {host} and {port} are filled in, and /health answers once it is ready.",
    )
    verifier: str = Field(
        "rollgym.envs.verifiers.judge:JudgeEnv",
        pattern=r"^[\w.]+:\w+$",
        description="module:Class of the verifier that asks it, served under the judge's name.",
    )
    startup_timeout_s: Seconds = Field(
        1800.0, description="A judge that does not answer by then is an error."
    )


class EnvironmentRoleSettings(Settings):
    """Workers of the environment server that the run starts, as actors of its Ray cluster."""

    actors: Count = Field(1, description="Actors at most.")
    cpus: PositiveFloat = Field(
        1.0,
        le=1024.0,
        description="CPUs that each reserves; it has as many child processes, and at least one.",
    )


class RolesSettings(Settings):
    """The placement of each role of the run."""

    actor_train: RoleSettings = Field(RoleSettings(), description="The ranks that train the policy.")
    actor_inference: RoleSettings = Field(
        RoleSettings(), description="Whoever samples: embedded engines, or servers that the run starts."
    )
    reference: RoleSettings = Field(
        RoleSettings(), description="The ranks of the reference policy, as many as it has devices."
    )
    critic: RoleSettings = Field(
        RoleSettings(), description="The ranks that train the critic, as many as it has devices."
    )
    judges: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")], JudgeSettings] = Field(
        {}, description="Judges by the environment id under which tasks and data sets name them."
    )
    environment: EnvironmentRoleSettings | None = Field(
        None,
        description="With kind ray: environments in actors of the cluster; absent: in processes beside the driver.",
    )

    @field_validator("judges")
    @classmethod
    def _judges_are_no_other_role(cls, value: dict[str, JudgeSettings]) -> dict[str, JudgeSettings]:
        if taken := sorted(value.keys() & cls.model_fields.keys()):
            raise ValueError(f"'{taken[0]}' is a role of its own: serve the judge by another environment id")
        return value


class ClusterSettings(Settings):
    """Which processes a run has, and on which machines and devices they run."""

    kind: Literal["local", "ray"] = Field(
        "local",
        description="local: processes of this machine; ray: actors of a Ray cluster (the extra [ray]).",
    )
    address: str | None = Field(
        None,
        min_length=1,
        description="With kind ray, the cluster: auto (the one that this machine belongs to) or HOST:PORT; if absent, "
        "one of this machine is started and ended with the run.",
    )
    nodes: Annotated[int, Field(ge=1, le=4096)] = Field(1, description="Machines that the roles are on.")
    devices_per_node: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="Devices of each; if absent, as many as the roles name on one node."
    )
    working_dir: UserPath | None = Field(
        None,
        min_length=1,
        description="With kind ray: directory that is sent to all nodes, where your own modules lie.",
    )
    offload: bool = Field(
        False,
        description="Ranks on devices of actor_inference bring their models to the processor's memory while replies "
        "are sampled.",
    )
    offload_models: bool = Field(
        False,
        description="Of the policy, the critic and the reference, those that share devices are there by turns: one "
        "that computes has the others leave to the processor's memory, which costs their way there and back.",
    )
    start_timeout_s: Seconds = Field(
        600.0, description="Roles that are not there by then, with the devices that they need, end the run."
    )
    restarts: Annotated[int, Field(ge=0, le=1000)] = Field(
        3,
        description="How often each role that dies is restarted without a new checkpoint in between. If a rank that "
        "trains dies, the run continues from the last checkpoint. 0 ends the run.",
    )
    restart_after_s: Seconds = Field(
        5.0,
        description="How long the first of these waits; each further one waits twice as long, up to 5 minutes.",
    )
    roles: RolesSettings = RolesSettings()

    @field_validator("address")
    @classmethod
    def _address_is_a_clusters(cls, value: str | None) -> str | None:
        if value is None or value == "auto":
            return value
        host, _, port = value.rpartition(":")
        if "://" in value or not host or not (port.isdecimal() and 0 < int(port) < 65_536):
            raise ValueError(
                f"'{value}' is neither auto nor HOST:PORT of a cluster's head, such as head.example:6379; from outside "
                "of a cluster a run is sent there by `ray job submit`"
            )
        return value

    @model_validator(mode="after")
    def _cluster_is_meant(self) -> Self:
        unread = self.changed("address", "working_dir")
        if self.roles.environment is not None:
            unread.append("roles.environment")
        # Who writes `kind: local` brings the settings of a cluster to one machine, and knows that these stay behind.
        if unread and self.kind == "local" and "kind" not in self.model_fields_set:
            raise ValueError(
                f"{', '.join(unread)}: read by kind 'ray' only, and kind is left out: set it to ray, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _local_is_one_machine(self) -> Self:
        if self.kind == "local" and self.nodes > 1:
            raise ValueError(
                f"kind 'local' is this machine, and nodes is {self.nodes}: set kind to ray, or leave nodes out"
            )
        return self
