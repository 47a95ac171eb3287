"""What a kind of inference servers is to the trainer: what is said to it, and the words that it is started with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rollgym.trainer.config.inference import InferenceSettings, LaunchSettings
from rollgym.trainer.config.server_kinds import SERVERS
from rollgym.trainer.core.plugins import load_attribute
from rollgym.trainer.inference.dialect import Capabilities, Conversation, Dialect, Need, Seen

SERVED_NAME = "policy"
"""What the model is called on servers that we start."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server is started with.

    Attributes:
        folder: The model's.
        max_length: Longest row in tokens.
        lora_rank: Largest rank of the adapters that it will be given; 0 for none.
        adapters: Adapters that it holds at once.
        broadcast: The collective that broadcasts weights; empty if they are not broadcast.
    """

    folder: Path
    max_length: int
    lora_rank: int = 0
    adapters: int = 1
    broadcast: str = ""


Command = tuple[list[str], dict[str, str]]
"""The words of a command line, and environment variables beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProgram:
    """A kind of inference servers. Nothing of it does I/O.

    Attributes:
        probe: Asks a server what it can do.
        look: Asks it for its name, release and model, by read-only calls.
        try_out: Asks it for tokens, if that was not possible when it was probed.
        sign_of_life: What it is asked to find whether it lives.
        engine_sign: What it is asked to find whether its engine works.
        command: What it is started with, given settings, the model and a port.
        row_switch: The switch by which it takes rows of so many tokens.
        exactly: What makes its log-probabilities those of the distribution that tokens are drawn from.
    """

    probe: Callable[[Need], Conversation[Dialect]]
    look: Callable[[Need], Conversation[Seen]]
    try_out: Callable[[Need, Capabilities], Conversation[Dialect]]
    sign_of_life: str
    engine_sign: str
    command: Callable[[InferenceSettings, LaunchSettings, ServedModel, int], Command]
    row_switch: Callable[[int], str]
    exactly: Callable[[Capabilities], str]


def server_program(name: str) -> ServerProgram:
    """Return the program of a kind of servers."""
    return cast(ServerProgram, load_attribute(SERVERS[name].program))
