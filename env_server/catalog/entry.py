"""One environment that a server offers: which worker runs it, and the options that clients may set."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gymnasium import Space

from rollgym.clients.protocol.spaces import UnicodeText, describe_space
from rollgym.clients.protocol.values import EncodeError, encode_value
from rollgym.env_server.catalog.actions import ActionReader, action_reader
from rollgym.env_server.catalog.kwargs_rules import KwargsRules
from rollgym.env_server.common.setting_sections import Isolation
from rollgym.env_server.workers.base import EnvSource


@dataclass(slots=True)
class CatalogEntry:
    """One environment that the server offers.

    The spaces are those of the environment as it is made without kwargs; they are known once it was probed. For an
    environment of registered servers, `replicas` counts them, and the entry says whether they keep the sessions. A
    `built_in` environment may be probed in this process. `label` is its name in metrics.
    """

    env_id: str
    source: EnvSource
    isolation: Isolation
    rules: KwargsRules
    step_timeout_s: float
    metadata: dict[str, Any]
    max_episode_steps: int | None
    deterministic: bool
    replicas: Callable[[], int] | None = None
    relayed: bool = False
    built_in: bool = False
    action_space: Space[Any] = field(default_factory=UnicodeText)
    observation_space: Space[Any] = field(default_factory=UnicodeText)
    read_action: ActionReader = field(init=False)
    label: str = ""

    def __post_init__(self) -> None:
        self.label = self.label or self.env_id
        self.read_action = action_reader(self.action_space)

    @property
    def version(self) -> str:
        """The version that the environment declares."""
        return str(self.metadata.get("version", "0"))

    @property
    def stateless(self) -> bool:
        """Whether it scores responses without a session."""
        return self.metadata.get("kind") == "stateless"

    @property
    def forkable(self) -> bool:
        """Whether a session can be copied, by replay of a deterministic environment."""
        return bool(self.metadata.get("forkable", self.deterministic)) and self.deterministic

    @property
    def reset_options(self) -> frozenset[str] | None:
        """The declared options of a reset; None if the environment declares none and accepts any."""
        declared = self.metadata.get("reset_options")
        return frozenset(map(str, declared)) if isinstance(declared, list | tuple) else None

    @property
    def render_modes(self) -> list[str]:
        """The modes that `render` takes: all but the one that opens a window on the server's machine."""
        modes = self.metadata.get("render_modes")
        return [str(mode) for mode in modes if mode != "human"] if isinstance(modes, list | tuple) else []

    def take_spaces(self, action_space: Space[Any], observation_space: Space[Any]) -> None:
        """Learn the spaces from an environment that was made."""
        self.action_space = action_space
        self.observation_space = observation_space
        self.read_action = action_reader(action_space)

    def describe(self) -> dict[str, Any]:
        """Return the `EnvInfo` that clients receive."""
        return {
            "env_id": self.env_id,
            "version": self.version,
            "kind": "stateless" if self.stateless else "episodic",
            "origin": "local" if self.replicas is None else "registered",
            "isolation": self.isolation,
            "description": str(self.metadata.get("description", "")),
            "action_space": describe_space(self.action_space),
            "observation_space": describe_space(self.observation_space),
            "kwargs_schema": self.rules.schema,
            "max_episode_steps": self.max_episode_steps,
            "deterministic": self.deterministic,
            "forkable": self.forkable,
            "replicas": 1 if self.replicas is None else self.replicas(),
            "metadata": _plain(self.metadata) | self._drawn(),
        }

    def _drawn(self) -> dict[str, Any]:
        return {"render_modes": self.render_modes} if "render_modes" in self.metadata else {}


def _plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an environment's metadata that can be encoded."""
    plain: dict[str, Any] = {}
    for name, value in metadata.items():
        try:
            plain[str(name)] = encode_value(None, value, binary=False)
        except EncodeError:
            continue
    return plain
