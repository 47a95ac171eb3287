"""The public face of rollgym: import everything that you need from here.

Names are loaded when they are first used, so ``import rollgym`` is cheap and never imports torch. It makes our
environments known to Gymnasium (``gymnasium.make("rollgym/FrozenLake-v0")``), as names: nothing of them is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rollgym.gymnasium_plugin import register_environments

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
    from envs.kwargs import OPERATOR, DeclaredKwargs, OneOf
    from envs.text_game import TextGame
    from envs.tools.base import ToolEnv
    from envs.tools.tool import Tool
    from envs.verifiers.base import Verdict, VerifierEnv
    from sandbox.core.base import Sandbox, SandboxSession
    from sandbox.core.limits import Limits
    from sandbox.core.program import Program
    from sandbox.core.result import Outcome, RunResult
    from sandbox.selection import open_sandbox
    from sandbox.warm.pool import WarmPool
    from trainer.config.load import load_settings
    from trainer.config.run import RunSettings
    from trainer.core.errors import ConfigError, RunError, TrainerError
    from trainer.records.trajectory import Trajectory
else:
    _EXPORTS = {
        "clients.client.client": ("EnvClient",),
        "clients.client.env": ("RemoteEnv",),
        "clients.protocol.errors": ("ProblemError",),
        "clients.protocol.spaces": ("UnicodeText",),
        "clients.client.session": ("EnvSession",),
        "clients.client.vector": ("RemoteVectorEnv",),
        "clients.client.verifier": ("RemoteVerifier",),
        "env_server.common.settings": ("ConfigurationError",),
        "env_server.process.mounting": ("create_app",),
        "envs.kwargs": ("OPERATOR", "DeclaredKwargs", "OneOf"),
        "envs.text_game": ("TextGame",),
        "envs.tools.base": ("ToolEnv",),
        "envs.tools.tool": ("Tool",),
        "envs.verifiers.base": ("Verdict", "VerifierEnv"),
        "sandbox.core.base": ("Sandbox", "SandboxSession"),
        "sandbox.core.limits": ("Limits",),
        "sandbox.warm.pool": ("WarmPool",),
        "sandbox.core.program": ("Program",),
        "sandbox.core.result": ("Outcome", "RunResult"),
        "sandbox.selection": ("open_sandbox",),
        "trainer.config.load": ("load_settings",),
        "trainer.config.run": ("RunSettings",),
        "trainer.core.errors": ("ConfigError", "RunError", "TrainerError"),
        "trainer.records.trajectory": ("Trajectory",),
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
    "ConfigError",
    "ConfigurationError",
    "DeclaredKwargs",
    "EnvClient",
    "EnvSession",
    "Limits",
    "OneOf",
    "Outcome",
    "ProblemError",
    "Program",
    "RemoteEnv",
    "RemoteVectorEnv",
    "RemoteVerifier",
    "RunError",
    "RunResult",
    "RunSettings",
    "Sandbox",
    "SandboxSession",
    "TextGame",
    "Tool",
    "ToolEnv",
    "TrainerError",
    "Trajectory",
    "UnicodeText",
    "Verdict",
    "VerifierEnv",
    "WarmPool",
    "__version__",
    "create_app",
    "load_settings",
    "open_sandbox",
]

# Gymnasium has had no plug-in mechanism since 1.0: packages register when they are imported.
register_environments()
