"""A file that names inference servers, one address a line; it may be changed during a run."""

import errno
import stat
from pathlib import Path

from rollgym.trainer.config.inference import inference_url
from rollgym.trainer.core.errors import ConfigError

_LARGEST = 2**20


def read_servers(path: Path) -> list[str]:
    """Return the addresses that a file names. Empty lines, and those that begin with #, are skipped.

    Raises:
        ConfigError: If it cannot be read, names no server, or contains a line that is not an address.
    """
    urls: list[str] = []
    known: set[str] = set()
    for number, line in enumerate(_text(path).splitlines(), start=1):
        named = line.strip()
        if not named or named.startswith("#"):
            continue
        try:
            url = inference_url(named)
        except ValueError as error:
            raise ConfigError(f"inference.urls_file: {path}, line {number}: {error}") from error
        if url in known:
            raise ConfigError(f"inference.urls_file: {path}, line {number} names {url} twice")
        urls.append(url)
        known.add(url)
    if not urls:
        raise ConfigError(f"inference.urls_file: {path} names no server: write one address a line")
    return urls


def _text(path: Path) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            # A pipe would be waited for, perhaps for ever.
            raise OSError(errno.EINVAL, "it is no regular file")
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        text = content.decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"inference.urls_file: cannot read {path}: {_trouble(error)}") from error
    if len(content) > _LARGEST:
        raise ConfigError(f"inference.urls_file: {path} is larger than a list of servers can be")
    return text


def _trouble(error: OSError | ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is no text"
    return str(error.strerror if isinstance(error, OSError) else error)
