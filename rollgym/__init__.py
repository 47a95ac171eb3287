"""The public face of rollgym: import everything that you need from here.

Names are loaded when they are first used, so ``import rollgym`` is cheap and never imports torch.
"""

from importlib import import_module
from typing import Any

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

__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'rollgym' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
