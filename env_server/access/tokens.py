"""Tokens: who calls, what they may do, and the file that says so; made, rotated and revoked by `roll-serve token`."""

import base64
import binascii
import hashlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.yaml_text import read_yaml, write_yaml
from rollgym.env_server.common.settings import ConfigurationError

Role = Literal["play", "register", "admin"]
ROLES: tuple[Role, ...] = ("play", "register", "admin")

_TOKEN_BYTES = 32
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Count = Annotated[int, Field(ge=1)]


class Quota(BaseModel):
    """The limits of one token. An unset limit is that of the server's settings for all tokens.

    Attributes:
        max_sessions: Sessions (`max_sessions_per_token`).
        rate_limit: Operations a second, in one I/O process.
        max_sockets: Open sockets, in one I/O process (`max_sockets_per_token`).
        max_registrations: Registrations at a gateway (`max_registrations_per_token`).
        max_runs: Programs that run or wait at one time, in one I/O process (`max_runs_per_token`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_sessions: _Count | None = None
    rate_limit: float | None = Field(None, gt=0, allow_inf_nan=False)
    max_sockets: _Count | None = None
    max_registrations: _Count | None = None
    max_runs: _Count | None = None


NO_QUOTA = Quota()
"""A token without limits of its own."""


class TokenEntry(Quota):
    """One name in the file.

    Attributes:
        name: The name of the token.
        roles: The operations that it allows.
        sha256: The hash of the token.
        previous: Hashes of tokens from before a rotation; they work until they are retired.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    roles: tuple[Role, ...] = Field(min_length=1)
    sha256: _Hash
    previous: tuple[_Hash, ...] = ()

    @property
    def quota(self) -> Quota:
        """The quota without the token's secret."""
        return Quota(**{name: getattr(self, name) for name in Quota.model_fields})


class _TokenFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tokens: list[TokenEntry] = Field(default_factory=list)


def read_tokens(path: Path) -> list[TokenEntry]:
    """The entries of a token file.

    Raises:
        ConfigurationError: If the file cannot be used.
    """
    try:
        content = read_yaml(path.read_text(encoding="utf-8"), path.name)
        entries = _TokenFile.model_validate({} if content is None else content).tokens
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"cannot read {path}: {why}") from error
    except ValidationError as error:
        raise ConfigurationError(
            f"{path} is not a token file (a list `tokens` of name, roles and sha256; "
            f"`roll-serve token` writes it): {error.errors()[0]['msg']} at {error.errors()[0]['loc']}"
        ) from error
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        raise ConfigurationError(f"{path}: two tokens have one name")
    return entries


def add_token(path: Path, name: str, roles: Iterable[Role], quota: Quota | None = None) -> str:
    """Make a token, add its hash to a token file and give the token.

    Raises:
        ConfigurationError: If the file cannot be used or the name is taken.
    """
    entries = read_tokens(path) if path.exists() else []
    if any(entry.name == name for entry in entries):
        raise ConfigurationError(
            f"{path} holds a token named {name!r} already; --rotate makes a new one for the name"
        )
    token = _new_token()
    limits = {} if quota is None else quota.model_dump()
    try:
        entry = TokenEntry(name=name, roles=tuple(roles), sha256=digest_of(token).hex(), **limits)
    except ValidationError as error:
        raise ConfigurationError(
            f"{name!r} is not a name of 1 to 64 letters, digits, '.', '_' or '-'"
        ) from error
    _write(path, [*entries, entry])
    return token


def rotate_token(path: Path, name: str) -> str:
    """Make a new token for a name; the one before works on until it is retired.

    Raises:
        ConfigurationError: If the file cannot be used or the name is not in it.
    """
    token = _new_token()
    _change(
        path,
        name,
        lambda entry: entry.model_copy(
            update={"sha256": digest_of(token).hex(), "previous": (entry.sha256, *entry.previous)}
        ),
    )
    return token


def retire_tokens(path: Path, name: str) -> None:
    """Let only the newest token of a name work.

    Raises:
        ConfigurationError: If the file cannot be used or the name is not in it.
    """
    _change(path, name, lambda entry: entry.model_copy(update={"previous": ()}))


def revoke_tokens(path: Path, name: str) -> None:
    """Take a name and all its tokens out of the file.

    Raises:
        ConfigurationError: If the file cannot be used or the name is not in it.
    """
    _change(path, name, lambda entry: None)


def digest_of(token: str) -> bytes:
    """The stored form of a token. Tokens are 256 random bits, so a plain hash cannot be guessed back."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _new_token() -> str:
    return "roll_" + secrets.token_urlsafe(_TOKEN_BYTES)


def _change(path: Path, name: str, change: Callable[[TokenEntry], TokenEntry | None]) -> None:
    entries = read_tokens(path)
    if all(entry.name != name for entry in entries):
        raise ConfigurationError(f"{path} holds no token named {name!r}")
    changed = [change(entry) if entry.name == name else entry for entry in entries]
    _write(path, [entry for entry in changed if entry is not None])


def _write(path: Path, entries: list[TokenEntry]) -> None:
    """Replace the file atomically: a server that reads it at that moment gets the old or the new one, complete."""
    content = [entry.model_dump(mode="json", exclude_defaults=True) for entry in entries]
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(write_yaml({"tokens": content}))
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise ConfigurationError(f"cannot write {path}: {error}") from error


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of an operation.

    Attributes:
        name: The name of the token; sessions belong to it.
        roles: The operations that the token allows; `admin` may do everything.
        quota: The token's limits.
        digest: The hash of the token, which identifies it after the file has changed.
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
"""The caller of operations that need no token."""


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
        """The caller that holds a token.

        Raises:
            ProblemError: `unauthorized`.
        """
        found = self._with_digest(digest_of(token))
        if found is None:
            raise ProblemError("unauthorized", "this token is not known")
        return found

    def again(self, caller: Caller) -> Caller | None:
        """The present holder of a caller's token, or None if it was revoked."""
        return self._with_digest(caller.digest) if self.required else caller

    def everybody(self) -> Iterator[Caller]:
        """All callers that there can be; one that has several tokens comes several times."""
        yield from self._callers if self.required else (ANYONE,)

    def key(self, name: str) -> bytes:
        """A secret of a name, the same on every server that knows its tokens; empty if no token is needed.

        During a rotation it comes from the older token, so that earlier signatures stay valid.
        """
        digests = [caller.digest for caller in self._callers if caller.name == name]
        return digests[-1] if digests else b""

    def named(self, name: str) -> Caller | None:
        """The caller of a name, if there is one: the owner of a session, or the caller of another process."""
        return next((caller for caller in self.everybody() if caller.name == name), None)

    def from_headers(self, headers: Mapping[str, str]) -> Caller | None:
        """The caller that sent these headers, or None if they lack credentials that are required.

        Raises:
            ProblemError: `unauthorized`, if the credentials are wrong.
        """
        if not self.required:
            return ANYONE
        header = headers.get("authorization")
        return None if header is None else self.caller(_token_of(header))

    def _with_digest(self, digest: bytes) -> Caller | None:
        # Each is compared in constant time, so that the duration reveals nothing about the hashes.
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
