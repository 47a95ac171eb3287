"""Worked turns that every prompt shows first: messages in the settings, or in a file of their own."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationError

from rollgym.clients.protocol.yaml_text import read_yaml
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.strict import JsonObject, Settings, UserPath

_KEY = "prompt.examples"
_LARGEST = 2**20
_MOST = 1000


class ExampleMessage(Settings):
    """A message of a worked turn."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = Field("", description="Its text.")
    tool_calls: list[JsonObject] | None = Field(
        None, description="Calls of tools, for chat templates that write them."
    )
    tool_call_id: str | None = Field(None, description="Which call a tool's message answers.")
    name: str | None = Field(None, description="Name of the tool that answers.")


def _form(value: Any) -> str:
    return "str" if isinstance(value, str) else "list"


ExampleMessages = Annotated[list[ExampleMessage], Field(min_length=1, max_length=_MOST)]
# Which of the two is meant is plain from the value: an error in a message is reported for the message alone.
WorkedExamples = Annotated[
    Annotated[ExampleMessages, Tag("list")] | Annotated[UserPath, Tag("str")], Discriminator(_form)
]
_MESSAGES: TypeAdapter[list[ExampleMessage]] = TypeAdapter(ExampleMessages)


def read_examples(
    examples: Sequence[ExampleMessage] | str | None, placement: str
) -> Sequence[ExampleMessage]:
    """Return the messages of worked turns.

    Args:
        examples: The messages, or the file that holds them, in YAML or JSON; None without examples.
        placement: Place of the environment's instruction (`prompt.instruction`).

    Raises:
        ConfigError: If a file cannot be read, or the messages are not whole turns.
    """
    if examples is None:
        return ()
    messages = _in_file(Path(examples)) if isinstance(examples, str) else examples
    where = f"{_KEY}: {examples}" if isinstance(examples, str) else _KEY
    if problem := _problem(messages, placement):
        raise ConfigError(f"{where}: {problem}")
    return messages


def _problem(messages: Sequence[ExampleMessage], placement: str) -> str | None:
    roles = [each.role for each in messages]
    if roles[0] == "system" and placement == "system":
        return (
            "it begins with a system message, and the environment's instruction would be another: set "
            "prompt.instruction to none or first_user, or leave the system message out"
        )
    turns = roles[1:] if roles[0] == "system" else roles
    if "system" in turns:
        return "a system message can only be the first"
    if not turns or turns[0] != "user" or turns[-1] != "assistant":
        return "worked turns begin with a message of the user, and end with one of the assistant"
    empty = next(
        (index for index, each in enumerate(messages) if not (each.content or each.tool_calls)), None
    )
    return None if empty is None else f"message {empty} says nothing: give it a content"


def _in_file(path: Path) -> list[ExampleMessage]:
    try:
        if not os.path.isfile(path):  # a pipe would be waited for, perhaps for ever
            raise ConfigError(
                f"{_KEY}: there is no file {path}; paths are taken from the directory of the command"
            )
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise ConfigError(f"{_KEY}: {path} is larger than the examples of a prompt can be")
        values = read_yaml(content.decode(), path.name)
    except OSError as error:
        raise ConfigError(f"{_KEY}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_KEY}: {path} is not text in UTF-8: {error.reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{_KEY}: {path} is neither YAML nor JSON: {error}") from error
    try:
        return _MESSAGES.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{_KEY}: {path}: {place + ': ' if place else ''}{first['msg']}") from error
