"""Which gateways are behind a gateway, so that none is registered with one that it stands behind itself."""

import asyncio
import secrets
from collections.abc import Iterable, Sequence

from clients.protocol.errors import ProblemError
from env_server.gateway.registry import Registry
from env_server.gateway.upstream.node import Node
from env_server.messages.validation import invalid

_ID_BYTES = 8
_ANSWER_S = 5.0


class Lineage:
    """The gateways behind this one, asked for anew each time: what they have behind them may have changed.

    Args:
        registry: The servers behind this gateway.

    Attributes:
        gateway_id: What this gateway is called among the others, until it is started anew.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.gateway_id = secrets.token_hex(_ID_BYTES)

    async def behind(self, path: Sequence[str]) -> list[str]:
        """The ids of this gateway and of all gateways behind it.

        Args:
            path: The gateways through which the question came; who finds itself there asks no further.
        """
        if self.gateway_id in path:
            return [self.gateway_id]
        nodes = {each.relay for each in self._registry if each.relay is not None}
        return sorted({self.gateway_id, *await self._behind_any(nodes, path)})

    async def refuse_circle(self, node: Node) -> None:
        """Refuse a server that passes sessions on to this gateway.

        Raises:
            ProblemError: `invalid_request`.
        """
        found = await self._behind_any([node], ())
        if self.gateway_id not in found:
            return
        url = node.target.url
        if len(found) == 1:
            raise invalid("url", f"{url} is this gateway itself: register the servers that have environments")
        raise invalid(
            "url",
            f"{url} is a gateway that has this one behind it, so that sessions would go round in a circle: gateways "
            "that stand side by side are not registered with each other; register their nodes with each of them",
        )

    async def _behind_any(self, nodes: Iterable[Node], path: Sequence[str]) -> set[str]:
        asked = (self._ask(node, [*path, self.gateway_id]) for node in nodes)
        return {gateway_id for found in await asyncio.gather(*asked) for gateway_id in found}

    @staticmethod
    async def _ask(node: Node, path: Sequence[str]) -> list[str]:
        """The gateways at a server and behind it; none where it is no gateway, or does not answer."""
        caller = node.link(True).caller
        try:
            async with asyncio.timeout(_ANSWER_S):
                connection = await caller.pool.connection(None)
                if caller.pool.info.get("role") != "gateway":
                    return []
                deadline = asyncio.get_running_loop().time() + _ANSWER_S
                fields = {"op": "info", "path": list(path)}
                reply = await connection.request(fields, deadline, caller.pool.max_request_bytes)
        except (ConnectionError, TimeoutError, ProblemError):
            # The probe says what is wrong with it, if it is to be registered.
            return []
        found = reply.payload.get("gateways") if isinstance(reply.payload, dict) else None
        return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []
