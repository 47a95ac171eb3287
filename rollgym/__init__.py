"""The public face of rollgym: import everything that you need from here.

Names are loaded when they are first used, so ``import rollgym`` is cheap and never imports torch. It makes our
environments known to Gymnasium (``gymnasium.make("rollgym/FrozenLake-v0")``), as names: nothing of them is imported.
"""

from importlib import import_module
from typing import Any

from rollgym.gymnasium_plugin import register_environments

__version__ = "0.1.0"

_EXPORTS = {
    "EnvClient": "clients.client",
    "EnvSession": "clients.session",
    "ProblemError": "clients.protocol.errors",
    "RemoteEnv": "clients.env",
    "RemoteVectorEnv": "clients.vector",
    "RemoteVerifier": "clients.verifier",
    "UnicodeText": "clients.protocol.spaces",
}

__all__ = [
    "EnvClient",
    "EnvSession",
    "ProblemError",
    "RemoteEnv",
    "RemoteVectorEnv",
    "RemoteVerifier",
    "UnicodeText",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'rollgym' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


# Gymnasium has had no plug-in mechanism since 1.0: packages register when they are imported.
register_environments()
