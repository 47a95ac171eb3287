"""The HTTP calls of all adapters."""

from env_server.protocols.gem import GEM_CALLS
from env_server.protocols.openenv import OPENENV_CALLS

ADAPTER_CALLS = (*GEM_CALLS, *OPENENV_CALLS)
