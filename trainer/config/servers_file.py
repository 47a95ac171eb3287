"""A file that names inference servers, one address a line; it may be changed while a run goes on."""

from pathlib import Path

from trainer.config.inference import inference_url
from trainer.core.errors import ConfigError

_LARGEST = 2**20


def read_servers(path: Path) -> list[str]:
    """Return the addresses that a file names. Empty lines, and those that begin with #, are passed over.

    Raises:
        ConfigError: If it cannot be read, names no server, or holds a line that is no address.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"inference.urls_file: cannot read {path}: {said}") from error
    if len(content) > _LARGEST:
        raise ConfigError(f"inference.urls_file: {path} is larger than a list of servers can be")
    urls: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        named = line.strip()
        if not named or named.startswith("#"):
            continue
        try:
            url = inference_url(named)
        except ValueError as error:
            raise ConfigError(f"inference.urls_file: {path}, line {number}: {error}") from error
        if url in urls:
            raise ConfigError(f"inference.urls_file: {path}, line {number} names {url} twice")
        urls.append(url)
    if not urls:
        raise ConfigError(f"inference.urls_file: {path} names no server: write one address a line")
    return urls
