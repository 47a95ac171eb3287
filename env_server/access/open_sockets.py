"""The sockets that are open: how many each token has, and which end when a token is revoked."""

from collections import Counter
from collections.abc import Callable

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.tokens import Caller, Tokens
from rollgym.env_server.common.setting_sections import AccessSettings

_RETRY_AFTER_S = 5


class ConnectionSlot:
    """One socket's slot among the open ones.

    Attributes:
        caller: The socket's owner; None until its token has arrived.
        address: The client's address.
        revoked: Whether its token was revoked: no frame is answered any more.
        on_change: Called when the caller has changed or was revoked.
    """

    __slots__ = ("address", "caller", "on_change", "revoked")

    def __init__(self, address: str) -> None:
        self.address = address
        self.caller: Caller | None = None
        self.revoked = False
        self.on_change: Callable[[], None] | None = None


class OpenSockets:
    """The open sockets of one I/O process.

    Args:
        settings: How many a token and an address may have.
    """

    def __init__(self, settings: AccessSettings) -> None:
        self._per_token = settings.max_sockets_per_token
        self._strangers_per_address = settings.max_unauthenticated_sockets
        self._slots: set[ConnectionSlot] = set()
        self._of_token: Counter[str] = Counter()
        self._strangers: Counter[str] = Counter()

    def enter(self, caller: Caller | None, address: str) -> ConnectionSlot:
        """Take a slot for a new socket, whose token may not have arrived yet.

        Raises:
            ProblemError: `at_capacity`.
        """
        slot = ConnectionSlot(address)
        if caller is not None:
            self._count(caller)
            slot.caller = caller
        else:
            if self._strangers[address] >= self._strangers_per_address:
                raise ProblemError(
                    "at_capacity",
                    f"{self._strangers_per_address} sockets of this address have sent no token yet",
                    retry_after=_RETRY_AFTER_S,
                    limit="max_unauthenticated_sockets",
                )
            self._strangers[address] += 1
        self._slots.add(slot)
        return slot

    def identify(self, slot: ConnectionSlot, caller: Caller) -> None:
        """Note whose token has come on a socket.

        Raises:
            ProblemError: `at_capacity`.
        """
        self._count(caller)
        self._forget_stranger(slot.address)
        slot.caller = caller

    def leave(self, slot: ConnectionSlot) -> None:
        """Release the slot of a closed socket."""
        self._slots.discard(slot)
        if slot.caller is None:
            self._forget_stranger(slot.address)
            return
        name = slot.caller.name
        self._of_token[name] -= 1
        if not self._of_token[name]:
            del self._of_token[name]

    def look_again(self, tokens: Tokens) -> None:
        """Notify the sockets whose tokens were revoked, or whose roles have changed."""
        for slot in list(self._slots):
            if slot.caller is None:
                continue
            caller = tokens.again(slot.caller)
            if caller is None or caller.name != slot.caller.name or not _plays(caller):
                slot.revoked = True
            else:
                slot.caller = caller
            if slot.on_change is not None:
                slot.on_change()

    def _count(self, caller: Caller) -> None:
        limit = caller.quota.max_sockets or self._per_token
        if self._of_token[caller.name] >= limit:
            raise ProblemError(
                "at_capacity",
                f"this token has its {limit} sockets",
                retry_after=_RETRY_AFTER_S,
                limit="max_sockets_per_token",
            )
        self._of_token[caller.name] += 1

    def _forget_stranger(self, address: str) -> None:
        self._strangers[address] -= 1
        if not self._strangers[address]:
            del self._strangers[address]


def _plays(caller: Caller) -> bool:
    return "play" in caller.roles or caller.is_admin
