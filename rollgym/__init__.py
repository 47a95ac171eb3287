"""The public face of rollgym: import everything that you need from here.

Names are loaded when they are first used, so ``import rollgym`` is cheap and never imports torch: only what parts of
the training itself are written with does, such as `TrajectoryBatch` and `model_folder`. It makes our
environments known to Gymnasium (``gymnasium.make("rollgym/FrozenLake-v0")``), as names: nothing of them is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rollgym.extras import missing_extra
from rollgym.gymnasium_plugin import register_once_gymnasium_is_imported
from rollgym.version import __version__

if TYPE_CHECKING:
    from rollgym.clients.checks.conformance import check_environment
    from rollgym.clients.client.client import EnvClient
    from rollgym.clients.client.env import RemoteEnv
    from rollgym.clients.client.session import EnvSession
    from rollgym.clients.client.vector import RemoteVectorEnv
    from rollgym.clients.client.verifier import RemoteVerifier
    from rollgym.clients.protocol.errors import ProblemError
    from rollgym.clients.protocol.spaces import UnicodeText
    from rollgym.clients.protocol.tool_calls import ToolCall
    from rollgym.env_server.common.settings import ConfigurationError
    from rollgym.env_server.process.embedding import create_app
    from rollgym.envs.adapters.text import TextAdapter
    from rollgym.envs.core.grid import GridGame
    from rollgym.envs.core.kwargs import OPERATOR, DeclaredKwargs, OneOf
    from rollgym.envs.core.text_game import Move, NamedGame, Refusal, TextGame
    from rollgym.envs.tools.base import ToolEnv, TurnResult, state_digest
    from rollgym.envs.tools.tool import Tool, Toolbox, ToolError, ToolResult, tool_parameters
    from rollgym.envs.verifiers.base import Verdict, VerifierEnv
    from rollgym.envs.verifiers.function import TaskVerifier, verifier
    from rollgym.envs.verifiers.pool import PoolShare
    from rollgym.sandbox.conformance import SandboxConformance
    from rollgym.sandbox.core.base import (
        Cancellation,
        Guarantees,
        Outcome,
        Program,
        RunResult,
        Sandbox,
        SandboxSession,
        SandboxUnavailableError,
    )
    from rollgym.sandbox.core.limits import Limits
    from rollgym.sandbox.core.probe import probe_sandbox
    from rollgym.sandbox.local.backends import NamespaceSandbox
    from rollgym.sandbox.remote.remote import RemoteSandbox
    from rollgym.sandbox.selection import open_sandbox
    from rollgym.sandbox.warm.pool import WarmPool
    from rollgym.trainer.algorithms.advantage import Advantage, TurnCredit
    from rollgym.trainer.algorithms.batch import StepTokens, SurrogateInputs, TrajectoryBatch
    from rollgym.trainer.algorithms.group_filters import Filter
    from rollgym.trainer.algorithms.surrogates import Surrogate
    from rollgym.trainer.config.load import load_settings
    from rollgym.trainer.config.output import TrackerSettings
    from rollgym.trainer.config.run import RunSettings
    from rollgym.trainer.core.errors import ConfigError, RunError, TrainerError
    from rollgym.trainer.core.seeding import derive_seed
    from rollgym.trainer.models.load import model_folder
    from rollgym.trainer.records.images import Picture
    from rollgym.trainer.records.trajectory import Trajectory, Turn
    from rollgym.trainer.rollout.actors import Actor
    from rollgym.trainer.rollout.agent import play_episode
    from rollgym.trainer.rollout.context import Exchange
    from rollgym.trainer.run.learning import train, train_async
    from rollgym.trainer.tasks.task import Task, TaskSource
else:
    _EXPORTS = {
        "rollgym.clients.checks.conformance": ("check_environment",),
        "rollgym.clients.client.client": ("EnvClient",),
        "rollgym.clients.client.env": ("RemoteEnv",),
        "rollgym.clients.client.session": ("EnvSession",),
        "rollgym.clients.client.vector": ("RemoteVectorEnv",),
        "rollgym.clients.client.verifier": ("RemoteVerifier",),
        "rollgym.clients.protocol.errors": ("ProblemError",),
        "rollgym.clients.protocol.spaces": ("UnicodeText",),
        "rollgym.envs.adapters.text": ("TextAdapter",),
        "rollgym.envs.core.grid": ("GridGame",),
        "rollgym.envs.core.kwargs": (
            "OPERATOR",
            "DeclaredKwargs",
            "OneOf",
        ),
        "rollgym.env_server.common.settings": ("ConfigurationError",),
        "rollgym.env_server.process.embedding": ("create_app",),
        "rollgym.envs.core.text_game": ("Move", "NamedGame", "Refusal", "TextGame"),
        "rollgym.envs.tools.base": ("ToolEnv", "TurnResult", "state_digest"),
        "rollgym.clients.protocol.tool_calls": ("ToolCall",),
        "rollgym.envs.tools.tool": ("Tool", "ToolError", "ToolResult", "Toolbox", "tool_parameters"),
        "rollgym.envs.verifiers.base": (
            "Verdict",
            "VerifierEnv",
        ),
        "rollgym.envs.verifiers.function": (
            "TaskVerifier",
            "verifier",
        ),
        "rollgym.envs.verifiers.pool": ("PoolShare",),
        "rollgym.sandbox.conformance": ("SandboxConformance",),
        "rollgym.sandbox.core.base": (
            "Cancellation",
            "Guarantees",
            "Outcome",
            "Program",
            "RunResult",
            "Sandbox",
            "SandboxSession",
            "SandboxUnavailableError",
        ),
        "rollgym.sandbox.core.limits": ("Limits",),
        "rollgym.sandbox.core.probe": ("probe_sandbox",),
        "rollgym.sandbox.local.backends": ("NamespaceSandbox",),
        "rollgym.sandbox.remote.remote": ("RemoteSandbox",),
        "rollgym.sandbox.selection": ("open_sandbox",),
        "rollgym.sandbox.warm.pool": ("WarmPool",),
        "rollgym.trainer.algorithms.advantage": (
            "Advantage",
            "TurnCredit",
        ),
        "rollgym.trainer.algorithms.batch": (
            "StepTokens",
            "SurrogateInputs",
            "TrajectoryBatch",
        ),
        "rollgym.trainer.algorithms.group_filters": ("Filter",),
        "rollgym.trainer.algorithms.surrogates": ("Surrogate",),
        "rollgym.trainer.run.learning": (
            "train",
            "train_async",
        ),
        "rollgym.trainer.config.load": ("load_settings",),
        "rollgym.trainer.config.run": ("RunSettings",),
        "rollgym.trainer.config.output": ("TrackerSettings",),
        "rollgym.trainer.core.errors": (
            "ConfigError",
            "RunError",
            "TrainerError",
        ),
        "rollgym.trainer.core.seeding": ("derive_seed",),
        "rollgym.trainer.models.load": ("model_folder",),
        "rollgym.trainer.records.images": ("Picture",),
        "rollgym.trainer.records.trajectory": (
            "Trajectory",
            "Turn",
        ),
        "rollgym.trainer.rollout.actors": ("Actor",),
        "rollgym.trainer.rollout.agent": ("play_episode",),
        "rollgym.trainer.rollout.context": ("Exchange",),
        "rollgym.trainer.tasks.task": (
            "Task",
            "TaskSource",
        ),
    }
    _HOMES = {name: home for home, names in _EXPORTS.items() for name in names}

    def __getattr__(name: str) -> Any:
        """Import a public name on first use (PEP 562)."""
        if name not in _HOMES:
            raise AttributeError(f"module 'rollgym' has no attribute {name!r}")
        try:
            return getattr(import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            if (missing := missing_extra(error, f"rollgym.{name}")) is None:
                raise
            raise missing from error

    def __dir__() -> list[str]:
        return sorted(__all__)


__all__ = [
    "OPERATOR",
    "Actor",
    "Advantage",
    "Cancellation",
    "ConfigError",
    "ConfigurationError",
    "DeclaredKwargs",
    "EnvClient",
    "EnvSession",
    "Exchange",
    "Filter",
    "GridGame",
    "Guarantees",
    "Limits",
    "Move",
    "NamedGame",
    "NamespaceSandbox",
    "OneOf",
    "Outcome",
    "Picture",
    "PoolShare",
    "ProblemError",
    "Program",
    "Refusal",
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
    "Surrogate",
    "SurrogateInputs",
    "Task",
    "TaskSource",
    "TaskVerifier",
    "TextAdapter",
    "TextGame",
    "Tool",
    "ToolCall",
    "ToolEnv",
    "ToolError",
    "ToolResult",
    "Toolbox",
    "TrackerSettings",
    "TrainerError",
    "Trajectory",
    "TrajectoryBatch",
    "Turn",
    "TurnCredit",
    "TurnResult",
    "UnicodeText",
    "Verdict",
    "VerifierEnv",
    "WarmPool",
    "__version__",
    "check_environment",
    "create_app",
    "derive_seed",
    "load_settings",
    "model_folder",
    "open_sandbox",
    "play_episode",
    "probe_sandbox",
    "state_digest",
    "tool_parameters",
    "train",
    "train_async",
    "verifier",
]

# Gymnasium has had no plug-in mechanism since 1.0: packages register when they are imported.
register_once_gymnasium_is_imported()
