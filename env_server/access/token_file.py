"""The token file: names, roles, hashes and quotas; made, rotated and revoked by `roll-serve token`."""

import hashlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from env_server.common.configuration import ConfigurationError

Role = Literal["play", "register", "admin"]
ROLES: tuple[Role, ...] = ("play", "register", "admin")

_TOKEN_BYTES = 32
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Count = Annotated[int, Field(ge=1)]


class Quota(BaseModel):
    """What one token may use. What is unset is as the server's settings say for all tokens.

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
        name: Whose token it is.
        roles: What it may do.
        sha256: The hash of the token.
        previous: Hashes of tokens from before a rotation; they work until they are retired.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    roles: tuple[Role, ...] = Field(min_length=1)
    sha256: _Hash
    previous: tuple[_Hash, ...] = ()

    @property
    def quota(self) -> Quota:
        """The quota alone."""
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
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        entries = _TokenFile.model_validate({} if content is None else content).tokens
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
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
    """What is kept of a token. Tokens are 256 random bits, so a plain hash cannot be guessed back."""
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
    """Put a new file in the place of the old one: a server that reads it meanwhile finds one of them, whole."""
    content = [entry.model_dump(mode="json", exclude_defaults=True) for entry in entries]
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(yaml.safe_dump({"tokens": content}, sort_keys=False))
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise ConfigurationError(f"cannot write {path}: {error}") from error
