"""Which server a request goes to: the one whose cache holds its past, unless that overloads it. No I/O."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

_REMEMBERED = 65_536
_SLACK_REQUESTS = 16
_SLACK_SHARE = 1.5


class Router:
    """Assigns requests to servers, and remembers the assignments of sessions and prompts.

    An episode stays on its first server, whose prefix cache holds its past (AReaL, verl, SGLang's router). The first
    turns of a group have one prompt, and go to one server, which computes it once; if that server is much busier
    than the least busy one, they go to the latter.

    Args:
        remembered: Sessions, and prompts, that are remembered; the ones that were not seen for longest are forgotten.
    """

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._prompts: OrderedDict[bytes, str] = OrderedDict()
        self._remembered = remembered

    def choose(
        self, session_key: str, prompt_ids: Sequence[int], tokens: int, loads: Mapping[str, int]
    ) -> str:
        """Return the server that a request goes to, and remember it.

        Args:
            session_key: The episode; empty if the request belongs to none.
            prompt_ids: All that the policy reads.
            tokens: The request's own load.
            loads: Tokens that run and wait at each server that answers now; at least one.
        """
        server = self._sessions.get(session_key) if session_key else None
        if server is None or server not in loads:
            server = self._by_prompt(prompt_ids, tokens, loads)
        if session_key:
            _remember(self._sessions, session_key, server, self._remembered)
        return server

    def _by_prompt(self, prompt_ids: Sequence[int], tokens: int, loads: Mapping[str, int]) -> str:
        digest = hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=16).digest()
        least = min(loads, key=lambda name: loads[name])
        server = self._prompts.get(digest, least)
        if server not in loads or _much_busier(loads[server], loads[least], tokens):
            server = least
        _remember(self._prompts, digest, server, self._remembered)
        return server


def _much_busier(load: int, least: int, tokens: int) -> bool:
    return load > _SLACK_SHARE * least + _SLACK_REQUESTS * tokens


def _remember(places: OrderedDict[Any, str], key: object, server: str, limit: int) -> None:
    places[key] = server
    places.move_to_end(key)
    if len(places) > limit:
        places.popitem(last=False)
