"""The HTTP calls of all faces."""

from env_server.protocols.gem import GEM_CALLS
from env_server.protocols.openenv import OPENENV_CALLS

FACE_CALLS = (*GEM_CALLS, *OPENENV_CALLS)
