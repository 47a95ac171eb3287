"""The back-ends that ship, each declared once; those of other packages are found by their entry points."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxKind:
    """A back-end.

    Attributes:
        name: Its name.
        path: `module:Class`, imported when it is asked for.
        automatic: Whether `auto` may choose it.
        argument: What may stand after a colon behind its name; empty for nothing.
        bounds_nothing: Whether to name it says that no protection is needed.
        needs_argument: Whether there is none of it without what stands after the colon.
    """

    name: str
    path: str
    automatic: bool = False
    argument: str = ""
    bounds_nothing: bool = False
    needs_argument: bool = False


SANDBOXES = (
    SandboxKind(name="namespaces", path="rollgym.sandbox.local.backends:NamespaceSandbox", automatic=True),
    SandboxKind(name="bubblewrap", path="rollgym.sandbox.local.backends:BubblewrapSandbox", automatic=True),
    SandboxKind(
        name="docker",
        path="rollgym.sandbox.containers.docker:DockerSandbox",
        automatic=True,
        argument="IMAGE",
    ),
    SandboxKind(name="landlock", path="rollgym.sandbox.local.backends:LandlockSandbox", automatic=True),
    SandboxKind(name="unsafe", path="rollgym.sandbox.local.backends:UnsafeSandbox", bounds_nothing=True),
    SandboxKind(
        name="remote",
        path="rollgym.sandbox.remote.remote:RemoteSandbox",
        argument="URL",
        needs_argument=True,
    ),
)
"""Ours, in the order in which `auto` tries them: what starts in milliseconds comes before what takes a second."""

BY_NAME = {each.name: each for each in SANDBOXES}
