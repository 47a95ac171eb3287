"""Tokens: who calls, and what they may do."""

import base64
import binascii
import hmac
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from clients.protocol.errors import ProblemError
from env_server.access.token_file import NO_QUOTA, ROLES, Quota, Role, add_token, digest_of, read_tokens
from env_server.common.configuration import ConfigurationError

__all__ = ["ANYONE", "ROLES", "Caller", "Role", "Tokens", "add_token"]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call.

    Attributes:
        name: The name of the token; sessions belong to it.
        roles: What the token may do; `admin` may do everything.
        quota: What the token may use.
        digest: The hash of the token, by which it is known again when the file has changed.
    """

    name: str
    roles: frozenset[str]
    quota: Quota = NO_QUOTA
    digest: bytes = b""

    @property
    def is_admin(self) -> bool:
        """Whether the caller may do everything."""
        return "admin" in self.roles

    def require(self, role: Role) -> None:
        """Refuse a caller without a role.

        Raises:
            ProblemError: `forbidden`.
        """
        if role not in self.roles and not self.is_admin:
            raise ProblemError("forbidden", f"this call needs a token with the role {role!r}")


ANYONE = Caller("anyone", frozenset(ROLES))
"""The caller of a server without tokens."""

NOBODY = Caller("nobody", frozenset())
"""The caller of what needs no token."""


class Tokens:
    """The tokens of a server. It keeps hashes only.

    Args:
        path: The token file; without one everybody may do everything.

    Raises:
        ConfigurationError: If the file cannot be used.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._callers: tuple[Caller, ...] = ()
        self.reload()

    @classmethod
    def load(cls, path: Path | None) -> "Tokens":
        """Read a token file; without one everybody may do everything.

        Raises:
            ConfigurationError: If the file cannot be used.
        """
        return cls(path)

    def reload(self) -> None:
        """Read the file again. If it cannot be used, the tokens stay as they are.

        Raises:
            ConfigurationError: If the file cannot be used.
        """
        if self._path is None:
            return
        entries = read_tokens(self._path)
        if not entries:
            raise ConfigurationError(f"{self._path} holds no tokens")
        self._callers = tuple(
            Caller(entry.name, frozenset(entry.roles), entry.quota, bytes.fromhex(digest))
            for entry in entries
            for digest in (entry.sha256, *entry.previous)
        )

    @property
    def required(self) -> bool:
        """Whether callers need a token."""
        return self._path is not None

    def caller(self, token: str) -> Caller:
        """Who holds a token.

        Raises:
            ProblemError: `unauthorized`.
        """
        found = self._with_digest(digest_of(token))
        if found is None:
            raise ProblemError("unauthorized", "this token is not known")
        return found

    def again(self, caller: Caller) -> Caller | None:
        """Who holds the token of a caller now, or None where it was revoked."""
        return self._with_digest(caller.digest) if self.required else caller

    def everybody(self) -> Iterator[Caller]:
        """All callers that there can be; one that has several tokens comes several times."""
        yield from self._callers if self.required else (ANYONE,)

    def key(self, name: str) -> bytes:
        """A secret of a name, the same on every server that knows its tokens; empty where no token is needed.

        While a rotation lasts it is the older token's, so that what was signed before holds on.
        """
        digests = [caller.digest for caller in self._callers if caller.name == name]
        return digests[-1] if digests else b""

    def named(self, name: str) -> Caller | None:
        """The caller of a name, if there is one: the owner of a session, or whom another process speaks for."""
        return next((caller for caller in self.everybody() if caller.name == name), None)

    def from_headers(self, headers: Mapping[str, str]) -> Caller | None:
        """Who sends these headers, or None where they hold no credentials and some are needed.

        Raises:
            ProblemError: `unauthorized`, if the credentials are wrong.
        """
        if not self.required:
            return ANYONE
        header = headers.get("authorization")
        return None if header is None else self.caller(_token_of(header))

    def _with_digest(self, digest: bytes) -> Caller | None:
        # Each is compared, and in constant time: how long it takes says nothing of what the hashes are.
        found: Caller | None = None
        for caller in self._callers:
            if hmac.compare_digest(digest, caller.digest):
                found = caller
        return found


def _token_of(header: str) -> str:
    scheme, _, rest = header.strip().partition(" ")
    rest = rest.strip()
    if scheme.lower() == "bearer" and rest:
        return rest
    if scheme.lower() == "basic":
        try:
            _, separator, password = base64.b64decode(rest, validate=True).decode("utf-8").partition(":")
        except (binascii.Error, UnicodeDecodeError):
            separator = password = ""
        if separator:
            return password
    raise ProblemError("unauthorized", "the Authorization header is neither a bearer token nor HTTP Basic")
