"""The back-ends that ship, each declared once, and how an operator names one.

A name is one line of text, in a setting or in the environment variable `ROLLGYM_SANDBOX`. Back-ends of other packages
are found by their entry points.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit, urlunsplit


def _image_option(image: str) -> dict[str, str]:
    return {"image": image} if image else {}


_REMOTE_OPTIONS = frozenset({"token_file"})


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxKind:
    """A back-end.

    Attributes:
        name: Its name.
        path: `module:Class`, imported when it is asked for.
        runs: Where programs run, in Markdown, for the documentation's table.
        needs: What must be there for it, for the same table.
        automatic: Whether `auto` may choose it.
        argument: What may stand after a colon behind its name; empty for nothing.
        options: Reads that as options of its class.
        needs_argument: Whether there is none of it without what stands after the colon.
        bounds_nothing: Whether to name it says that no protection is needed.
        elsewhere: Whether programs run on another server.
        of_images: Whether programs find the files of an image, and not this machine's.
        holds_agents: Whether an agent's program can run in it: it shows folders of this machine, with the socket by
            which the agent reaches its policy, and no network.
    """

    name: str
    path: str
    runs: str
    needs: str = ""
    automatic: bool = False
    argument: str = ""
    options: Callable[[str], dict[str, str]] | None = None
    needs_argument: bool = False
    bounds_nothing: bool = False
    elsewhere: bool = False
    of_images: bool = False
    holds_agents: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """How it can be named: alone, and with what may stand after a colon."""
        alone = () if self.needs_argument else (self.name,)
        return (*alone, f"{self.name}:{self.argument}") if self.argument else alone

    def is_named_by(self, text: str) -> bool:
        """Whether a text names it, with or without what stands after a colon."""
        name, colon, argument = text.partition(":")
        return name == self.name and (
            bool(argument.strip() and self.argument) if colon else not self.needs_argument
        )


SANDBOXES = (
    SandboxKind(
        name="namespaces",
        path="rollgym.sandbox.local.backends:NamespaceSandbox",
        runs="on this machine, in namespaces of their own",
        needs="Linux",
        automatic=True,
        holds_agents=True,
    ),
    SandboxKind(
        name="bubblewrap",
        path="rollgym.sandbox.local.backends:BubblewrapSandbox",
        runs="on this machine, in those that `bwrap` makes",
        needs="Linux, Bubblewrap",
        automatic=True,
        holds_agents=True,
    ),
    SandboxKind(
        name="docker",
        path="rollgym.sandbox.containers.docker:DockerSandbox",
        runs="in warm containers",
        needs="[a Docker Engine](#docker), the extra `docker`",
        automatic=True,
        argument="IMAGE",
        options=_image_option,
        of_images=True,
        holds_agents=True,
    ),
    SandboxKind(
        name="landlock",
        path="rollgym.sandbox.local.backends:LandlockSandbox",
        runs="on this machine, in a directory of the host",
        needs="Linux with Landlock",
        automatic=True,
    ),
    SandboxKind(
        name="unsafe",
        path="rollgym.sandbox.local.backends:UnsafeSandbox",
        runs="on this machine, with limits only and no security boundary",
        bounds_nothing=True,
    ),
    SandboxKind(
        name="remote",
        path="rollgym.sandbox.remote.remote:RemoteSandbox",
        runs="on [another server](#remote) with a sandbox",
        argument="URL",
        options=_remote_options,
        needs_argument=True,
        elsewhere=True,
    ),
)
"""Ours, in the order in which `auto` tries them: what starts in milliseconds comes before what takes a second."""

BY_NAME = {each.name: each for each in SANDBOXES}


def kind_named(text: str) -> SandboxKind | None:
    """Return the back-end of ours that a text names, with or without what stands after a colon; None for no such."""
    return next((each for each in SANDBOXES if each.is_named_by(text)), None)


VARIABLE = "ROLLGYM_SANDBOX"


def parse_sandbox_name(text: str | None) -> tuple[str, dict[str, str]]:
    """Return a back-end's name and the options for it.

    Args:
        text: `auto`, the name of a back-end, `docker:IMAGE`, `remote:URL` or `remote:URL?token_file=PATH`; `NAME:TEXT`
            for the back-end of another package, which has the text as its option `argument`. None for the value of the
            environment variable, or `auto` if that is not set.

    Raises:
        ValueError: If it is none of these.
    """
    name, _, argument = (text or os.environ.get(VARIABLE) or "auto").partition(":")
    kind = BY_NAME.get(name)
    if kind is not None and kind.options is not None:
        return name, kind.options(argument)
    if argument and (kind is not None or name == "auto"):
        others = " and ".join(each.name for each in SANDBOXES if each.argument)
        raise ValueError(f"the sandbox {name!r} has nothing after a colon; {others} have")
    return name, {"argument": argument} if argument else {}
