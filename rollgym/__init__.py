"""The public face of rollgym: import everything that you need from here.

Names are loaded when they are first used, so ``import rollgym`` is cheap and never imports torch: only what parts of
the training itself are written with does, such as `TrajectoryBatch`, `play_episode` and `model_folder`. It makes our
environments known to Gymnasium (``gymnasium.make("rollgym/FrozenLake-v0")``), as names: nothing of them is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rollgym.gymnasium_plugin import register_once_gymnasium_is_imported

__version__ = "0.1.0"

if TYPE_CHECKING:
    from clients.client.client import EnvClient
    from clients.client.env import RemoteEnv
    from clients.client.session import EnvSession
    from clients.client.vector import RemoteVectorEnv
    from clients.client.verifier import RemoteVerifier
    from clients.protocol.errors import ProblemError
    from clients.protocol.spaces import UnicodeText
    from env_server.common.settings import ConfigurationError
    from env_server.process.mounting import create_app
    from envs.adapters.text import TextAdapter
    from envs.core.grid import GridGame
    from envs.core.kwargs import OPERATOR, DeclaredKwargs, OneOf
    from envs.core.text_game import TextGame
    from envs.tools.base import ToolEnv
    from envs.tools.tool import Tool, Toolbox
    from envs.verifiers.base import Verdict, VerifierEnv
    from envs.verifiers.function import TaskVerifier, verifier
    from envs.verifiers.pool import PoolShare
    from sandbox.conformance import SandboxConformance
    from sandbox.core.base import Sandbox, SandboxSession, SandboxUnavailableError
    from sandbox.core.cancelling import Cancellation
    from sandbox.core.limits import Limits
    from sandbox.core.probe import probe_sandbox
    from sandbox.core.program import Program
    from sandbox.core.result import Guarantees, Outcome, RunResult
    from sandbox.local.backends import NamespaceSandbox
    from sandbox.remote.remote import RemoteSandbox
    from sandbox.selection import open_sandbox
    from sandbox.warm.pool import WarmPool
    from trainer.algorithms.batch import StepTokens, SurrogateInputs, TrajectoryBatch
    from trainer.commands.learning import train, train_async
    from trainer.config.load import load_settings
    from trainer.config.run import RunSettings
    from trainer.core.errors import ConfigError, RunError, TrainerError
    from trainer.core.seeding import derive_seed
    from trainer.models.load import model_folder
    from trainer.records.images import Picture
    from trainer.records.trajectory import Trajectory, Turn
    from trainer.rollout.actors import Actor
    from trainer.rollout.agent import play_episode
    from trainer.rollout.context import Exchange
    from trainer.tasks.task import Task, TaskSource
else:
    _EXPORTS = {
        "clients.client.client": ("EnvClient",),
        "clients.client.env": ("RemoteEnv",),
        "clients.client.session": ("EnvSession",),
        "clients.client.vector": ("RemoteVectorEnv",),
        "clients.client.verifier": ("RemoteVerifier",),
        "clients.protocol.errors": ("ProblemError",),
        "clients.protocol.spaces": ("UnicodeText",),
        "envs.adapters.text": ("TextAdapter",),
        "envs.core.grid": ("GridGame",),
        "envs.core.kwargs": (
            "OPERATOR",
            "DeclaredKwargs",
            "OneOf",
        ),
        "env_server.common.settings": ("ConfigurationError",),
        "env_server.process.mounting": ("create_app",),
        "envs.core.text_game": ("TextGame",),
        "envs.tools.base": ("ToolEnv",),
        "envs.tools.tool": ("Tool", "Toolbox"),
        "envs.verifiers.base": (
            "Verdict",
            "VerifierEnv",
        ),
        "envs.verifiers.function": (
            "TaskVerifier",
            "verifier",
        ),
        "envs.verifiers.pool": ("PoolShare",),
        "sandbox.conformance": ("SandboxConformance",),
        "sandbox.core.base": (
            "Sandbox",
            "SandboxSession",
            "SandboxUnavailableError",
        ),
        "sandbox.core.cancelling": ("Cancellation",),
        "sandbox.core.limits": ("Limits",),
        "sandbox.core.probe": ("probe_sandbox",),
        "sandbox.core.program": ("Program",),
        "sandbox.core.result": (
            "Guarantees",
            "Outcome",
            "RunResult",
        ),
        "sandbox.local.backends": ("NamespaceSandbox",),
        "sandbox.remote.remote": ("RemoteSandbox",),
        "sandbox.selection": ("open_sandbox",),
        "sandbox.warm.pool": ("WarmPool",),
        "trainer.algorithms.batch": (
            "StepTokens",
            "SurrogateInputs",
            "TrajectoryBatch",
        ),
        "trainer.commands.learning": (
            "train",
            "train_async",
        ),
        "trainer.config.load": ("load_settings",),
        "trainer.config.run": ("RunSettings",),
        "trainer.core.errors": (
            "ConfigError",
            "RunError",
            "TrainerError",
        ),
        "trainer.core.seeding": ("derive_seed",),
        "trainer.models.load": ("model_folder",),
        "trainer.records.images": ("Picture",),
        "trainer.records.trajectory": (
            "Trajectory",
            "Turn",
        ),
        "trainer.rollout.actors": ("Actor",),
        "trainer.rollout.agent": ("play_episode",),
        "trainer.rollout.context": ("Exchange",),
        "trainer.tasks.task": (
            "Task",
            "TaskSource",
        ),
    }
    _HOMES = {name: home for home, names in _EXPORTS.items() for name in names}

    def __getattr__(name: str) -> Any:
        """Import a public name on first use (PEP 562)."""
        if name not in _HOMES:
            raise AttributeError(f"module 'rollgym' has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        return sorted(__all__)


__all__ = [
    "OPERATOR",
    "Actor",
    "Cancellation",
    "ConfigError",
    "ConfigurationError",
    "DeclaredKwargs",
    "EnvClient",
    "EnvSession",
    "Exchange",
    "GridGame",
    "Guarantees",
    "Limits",
    "NamespaceSandbox",
    "OneOf",
    "Outcome",
    "Picture",
    "PoolShare",
    "ProblemError",
    "Program",
    "RemoteEnv",
    "RemoteSandbox",
    "RemoteVectorEnv",
    "RemoteVerifier",
    "RunError",
    "RunResult",
    "RunSettings",
    "Sandbox",
    "SandboxConformance",
    "SandboxSession",
    "SandboxUnavailableError",
    "StepTokens",
    "SurrogateInputs",
    "Task",
    "TaskSource",
    "TaskVerifier",
    "TextAdapter",
    "TextGame",
    "Tool",
    "ToolEnv",
    "Toolbox",
    "TrainerError",
    "Trajectory",
    "TrajectoryBatch",
    "Turn",
    "UnicodeText",
    "Verdict",
    "VerifierEnv",
    "WarmPool",
    "__version__",
    "create_app",
    "derive_seed",
    "load_settings",
    "model_folder",
    "open_sandbox",
    "play_episode",
    "probe_sandbox",
    "train",
    "train_async",
    "verifier",
]

# Gymnasium has had no plug-in mechanism since 1.0: packages register when they are imported.
register_once_gymnasium_is_imported()
