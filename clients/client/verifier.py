"""RemoteVerifier: a stateless environment on a server as a scoring function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rollgym.clients.client.client import CONNECT_TIMEOUT_S, Encoding, EnvClient
from rollgym.clients.process.background import BackgroundLoop
from rollgym.clients.protocol.messages import VerdictReply


class RemoteVerifier:
    """Scores responses in batches; nothing is kept on the server, so every call may be repeated.

    Examples:
        >>> with RemoteVerifier("http://127.0.0.1:8000", "Arithmetic-v0") as verifier:
        ...     verdicts = verifier.score([{"response": "4", "question": "2 + 2", "answer": "4"}])

    Args:
        url: The server's address.
        env_id: A stateless environment of the server's catalog.
        token: Bearer token; that of the environment variable `ROLLGYM_TOKEN` if None.
        encoding: `json` or `msgpack`.
        timeout_s: How long one call may take, with all reconnects and retries.
        connect_timeout_s: How long the first call waits for a server that does not answer. Once it has answered, it may
            be away for minutes.
    """

    def __init__(
        self,
        url: str,
        env_id: str,
        *,
        token: str | None = None,
        encoding: Encoding = "json",
        timeout_s: float = 600.0,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self.env_id = env_id
        self._client = EnvClient(
            url, token=token, encoding=encoding, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s
        )
        self._background = BackgroundLoop()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def score(
        self, items: Sequence[Mapping[str, Any]], *, item_timeout_s: float | None = None
    ) -> list[VerdictReply]:
        """Score responses.

        Args:
            items: Each `{"response": ..., ...task fields}`.
            item_timeout_s: How long one item may take; the server's setting if None.

        Returns:
            Verdicts in the order of the items. `outcome` distinguishes a wrong answer from a verifier that failed.

        Raises:
            ProblemError: The server refuses.
            ConnectionError: The server cannot be reached; the message names the address and the remedy.
        """
        return self._background.run(self._client.verify(self.env_id, items, timeout_s=item_timeout_s))

    def close(self) -> None:
        """Close the connection; closing again does nothing."""
        if not self._closed:
            self._closed = True
            self._background.run(self._client.close())
            self._background.close()
