"""How an operator names a sandbox: one line of text, in a setting or in the environment variable `ROLLGYM_SANDBOX`."""

import os
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from rollgym.sandbox.core.kinds import SANDBOXES

VARIABLE = "ROLLGYM_SANDBOX"
_REMOTE_OPTIONS = frozenset({"token_file"})
_WITHOUT_ARGUMENT = frozenset({"auto", *(each.name for each in SANDBOXES if not each.argument)})


def parse_name(text: str | None) -> tuple[str, dict[str, str]]:
    """Return a back-end's name and the options for it.

    Args:
        text: `auto`, the name of a back-end, `docker:IMAGE`, `remote:URL` or `remote:URL?token_file=PATH`; `NAME:TEXT`
            for the back-end of another package, which has the text as its option `argument`. None for the value of the
            environment variable, or `auto` if that is not set.

    Raises:
        ValueError: If it is none of these.
    """
    name, _, argument = (text or os.environ.get(VARIABLE) or "auto").partition(":")
    if name == "docker":
        return name, {"image": argument} if argument else {}
    if name == "remote":
        return name, _remote_options(argument)
    if argument and name in _WITHOUT_ARGUMENT:
        raise ValueError(f"the sandbox {name!r} has nothing after a colon; docker and remote have")
    return name, {"argument": argument} if argument else {}


def _remote_options(address: str) -> dict[str, str]:
    url = urlsplit(address)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(
            f"remote needs the address of a server, such as remote:http://sandbox:8000, not {address!r}"
        )
    options = dict(parse_qsl(url.query, keep_blank_values=True))
    unknown = options.keys() - _REMOTE_OPTIONS
    if unknown:
        raise ValueError(
            f"remote has no option {min(unknown)!r}; it has {', '.join(sorted(_REMOTE_OPTIONS))}"
        )
    return {"url": urlunsplit((url.scheme, url.netloc, url.path, "", "")), **options}
