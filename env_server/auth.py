"""Tokens: who calls, and what they may do."""

import base64
import binascii
import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clients.protocol.errors import ProblemError
from env_server.configuration import ConfigurationError

Role = Literal["play", "register", "admin"]
ROLES: tuple[Role, ...] = ("play", "register", "admin")
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call.

    Attributes:
        name: The name of the token; sessions belong to it.
        roles: What the token may do; `admin` may do everything.
        row: Position in the token file, for quotas.
    """

    name: str
    roles: frozenset[str]
    row: int = 0

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


class _TokenEntry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    roles: list[Role] = Field(min_length=1)
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _TokenFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tokens: list[_TokenEntry] = Field(default_factory=list)


class Tokens:
    """The tokens of a server. It keeps hashes only: tokens are random, so a plain hash cannot be guessed back."""

    def __init__(self, entries: Iterable[tuple[Caller, bytes]]) -> None:
        self._entries = tuple(entries)

    @classmethod
    def load(cls, path: Path | None) -> "Tokens":
        """Read a token file; without one everybody may do everything.

        Raises:
            ConfigurationError: If the file cannot be used.
        """
        if path is None:
            return cls(())
        entries = _read(path).tokens
        if not entries:
            raise ConfigurationError(f"{path} holds no tokens")
        names = [entry.name for entry in entries]
        if len(set(names)) != len(names):
            raise ConfigurationError(f"{path}: two tokens have one name")
        return cls(
            (Caller(entry.name, frozenset(entry.roles), row), bytes.fromhex(entry.sha256))
            for row, entry in enumerate(entries)
        )

    @property
    def required(self) -> bool:
        """Whether callers need a token."""
        return bool(self._entries)

    @property
    def count(self) -> int:
        """How many rows of quotas the tokens need (one where no token is needed)."""
        return max(1, len(self._entries))

    def caller(self, token: str) -> Caller:
        """Who holds a token.

        Raises:
            ProblemError: `unauthorized`.
        """
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        found: Caller | None = None
        for caller, known in self._entries:
            if hmac.compare_digest(digest, known):
                found = caller
        if found is None:
            raise ProblemError("unauthorized", "this token is not known")
        return found

    def everybody(self) -> Iterator[Caller]:
        """All callers that there can be."""
        yield from [caller for caller, _ in self._entries] or [ANYONE]

    def key(self, name: str) -> bytes:
        """A secret of a token, the same on every server that knows the token; empty where no token is needed."""
        return next((known for caller, known in self._entries if caller.name == name), b"")

    def named(self, name: str) -> Caller | None:
        """The caller of a name, if there is one: the owner of a session, or whom another process speaks for."""
        return next((caller for caller in self.everybody() if caller.name == name), None)

    def from_headers(self, headers: Mapping[str, str]) -> Caller | None:
        """Who sends these headers, or None where they hold no credentials and some are needed.

        Raises:
            ProblemError: `unauthorized`, if the credentials are wrong.
        """
        if not self._entries:
            return ANYONE
        header = headers.get("authorization")
        return None if header is None else self.caller(_token_of(header))


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


def add_token(path: Path, name: str, roles: Iterable[Role]) -> str:
    """Make a token, add its hash to a token file and give the token.

    Raises:
        ConfigurationError: If the file cannot be used or the name is taken.
    """
    file = _read(path) if path.exists() else _TokenFile()
    if any(entry.name == name for entry in file.tokens):
        raise ConfigurationError(f"{path} holds a token named {name!r} already")
    token = "roll_" + secrets.token_urlsafe(_TOKEN_BYTES)
    try:
        entry = _TokenEntry(name=name, roles=list(roles), sha256=hashlib.sha256(token.encode()).hexdigest())
    except ValidationError as error:
        raise ConfigurationError(
            f"{name!r} is not a name of 1 to 64 letters, digits, '.', '_' or '-'"
        ) from error
    file.tokens.append(entry)
    text = yaml.safe_dump(file.model_dump(), sort_keys=False)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error}") from error
    return token


def _read(path: Path) -> _TokenFile:
    try:
        return _TokenFile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    except ValidationError as error:
        raise ConfigurationError(
            f"{path} is not a token file (a list `tokens` of name, roles and sha256; "
            f"`roll-serve token` writes it): {error.errors()[0]['msg']} at {error.errors()[0]['loc']}"
        ) from error
