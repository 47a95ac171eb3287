"""OpenEnv's messages as one of its clients sends and reads them; no I/O."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from rollgym.clients.protocol.arrays import EncodeError
from rollgym.clients.protocol.frames import dumps
from rollgym.env_server.gateway.upstream.base import UpstreamError
from rollgym.env_server.gateway.upstream.reading import as_text, read_foreign_info, read_json
from rollgym.env_server.workers.base import StepOutcome

_NOT_OBSERVED = frozenset({"done", "reward", "metadata"})
_MAX_MESSAGE = 1000
_TRUNCATED = ("truncated", "TimeLimit.truncated")

STATE = dumps({"type": "state"}, binary=False)
CLOSE = dumps({"type": "close"}, binary=False)


class OpenEnvRefused(Exception):  # noqa: N818 - the name says what happened
    """The server answered with an error.

    Args:
        code: One of OpenEnv's.
        message: What it says.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@dataclass(frozen=True, slots=True)
class OpenEnvMessages:
    """Builds messages to one environment and reads its answers.

    Attributes:
        action_field: The field of an action that a text is for; None if a text is the JSON of a whole action.
        action_is_text: Whether that field takes a text as it is; the text is the field's JSON otherwise.
        observation_field: The field of a step's observation that is the text; None if that is the observation's JSON.
        reset_field: The same of a reset's observation.
    """

    action_field: str | None
    action_is_text: bool
    observation_field: str | None
    reset_field: str | None

    @classmethod
    def of(
        cls, schemas: Mapping[str, Any], action_field: str | None, observation_field: str | None
    ) -> "OpenEnvMessages":
        """The messages that fit an environment's schemas.

        Without a name, a text is for the one field that an action must have (or the only one that it may have), and the
        text of an observation is its one field of text. Where there is no such field, the text is the JSON of all.

        Args:
            schemas: What the server answers to `GET /schema`.
            action_field: The field that whoever registered the server has named.
            observation_field: Likewise.

        Raises:
            UpstreamError: The schemas cannot be read, or have no such field.
        """
        action, observation = _object_schema("action", schemas), _object_schema("observation", schemas)
        begin = _object_schema("reset_observation", {"reset_observation": observation, **schemas})
        if action_field is None:
            action_field = _only_action_field(action)
        field = None if action_field is None else _property("action", action, action_field)
        return cls(
            action_field,
            field is not None and _takes_text(field, action),
            _observed_field("observation", observation, observation_field),
            _observed_field("reset_observation", begin, observation_field),
        )

    def reset(self, seed: int | None, parameters: Mapping[str, Any]) -> bytes:
        """The message that begins an episode."""
        data = dict(parameters)
        if seed is not None:
            data["seed"] = seed
        return dumps({"type": "reset", "data": data}, binary=False)

    def step(self, text: str) -> bytes:
        """The message that takes a text as an action.

        A text that should be JSON and is none goes as it is: what it is worth is the environment's to say.
        """
        if not self.action_is_text:
            # What is nested more deeply than can be written again goes as it is, too.
            with suppress(orjson.JSONDecodeError, EncodeError):
                return self._step(orjson.loads(text))
        return self._step(text)

    def _step(self, value: Any) -> bytes:
        data = value if self.action_field is None else {self.action_field: value}
        return dumps({"type": "step", "data": data}, binary=False)

    def read_reset(self, answer: bytes) -> tuple[str, Mapping[str, Any]]:
        """The observation and the info of an answer to a reset.

        Raises:
            OpenEnvRefused: It is an error.
            UpstreamError: It cannot be read.
        """
        text, info, _ = _read(answer, self.reset_field)
        return text, info

    def read_step(self, answer: bytes) -> StepOutcome:
        """What an answer to a step says. Raises like `read_reset`."""
        text, info, data = _read(answer, self.observation_field)
        done, reward = data.get("done"), data.get("reward")
        if type(done) is not bool:
            raise UpstreamError("done of a step is no boolean")
        if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
            raise UpstreamError("the reward is not a finite number")
        metadata = info.get("metadata", {})
        truncated = done and any(metadata.get(name) is True for name in _TRUNCATED)
        terminated = done and (not truncated or metadata.get("terminated") is True)
        return StepOutcome(text, float(reward or 0.0), terminated, truncated, info)


def read_data(answer: bytes) -> dict[str, Any]:
    """What an answer holds.

    Raises:
        OpenEnvRefused: It is an error.
        UpstreamError: It cannot be read.
    """
    try:
        message = read_json(answer)
    except orjson.JSONDecodeError as error:
        raise UpstreamError("an answer is no JSON") from error
    data = message.get("data") if isinstance(message, dict) else None
    if not isinstance(data, dict):
        raise UpstreamError("an answer is no object with data")
    if message.get("type") == "error":
        raise OpenEnvRefused(str(data.get("code", "")), _message(data))
    return data


def _message(data: Mapping[str, Any]) -> str:
    """What an error says, and of which fields."""
    parts = [str(data.get("message", ""))]
    errors = data.get("errors")
    for error in errors if isinstance(errors, list) else []:
        if isinstance(error, dict):
            place = error.get("loc")
            where = ".".join(map(str, place)) if isinstance(place, list) else ""
            parts.append(f"{where}: {error.get('msg', '')}")
    return "; ".join(parts)[:_MAX_MESSAGE]


def _read(answer: bytes, field: str | None) -> tuple[str, Mapping[str, Any], dict[str, Any]]:
    """The text, the info and all else of an answer with an observation."""
    data = read_data(answer)
    observation = data.get("observation")
    if not isinstance(observation, dict):
        raise UpstreamError("there is no observation in the answer")
    metadata: dict[str, Any] = {}
    for given in (observation.get("metadata"), data.get("metadata")):
        if isinstance(given, dict):
            metadata |= given
    own = observation.get("info")
    others = {name: value for name, value in observation.items() if name not in _NOT_OBSERVED}
    if field is None:
        text = as_text(others)
    elif field in observation:
        text = "" if observation[field] is None else as_text(observation[field])
        del others[field]
    else:
        raise UpstreamError(f"there is no {field!r} in the observation")
    if isinstance(own, dict):
        del others["info"]
        others |= own
    if metadata:
        others["metadata"] = metadata
    return text, read_foreign_info(others), data


def _object_schema(name: str, schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = schemas.get(name)
    if not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict):
        raise UpstreamError(f"the schema of the {name} is not that of an object")
    return schema


def _property(name: str, schema: Mapping[str, Any], field: str) -> Any:
    if field not in schema["properties"]:
        known = ", ".join(sorted(schema["properties"]))
        raise UpstreamError(f"the {name} has no field {field!r}: it has {known}")
    return schema["properties"][field]


def _only_action_field(schema: Mapping[str, Any]) -> str | None:
    fields = [field for field in schema["properties"] if field != "metadata"]
    required = [field for field in fields if field in schema.get("required", ())]
    return next((found[0] for found in (required, fields) if len(found) == 1), None)


def _observed_field(name: str, schema: Mapping[str, Any], named: str | None) -> str | None:
    if named is not None:
        _property(name, schema, named)
        return named
    fields = [
        field
        for field, each in schema["properties"].items()
        if field not in _NOT_OBSERVED and _takes_text(each, schema)
    ]
    required = [field for field in fields if field in schema.get("required", ())]
    return next((found[0] for found in (required, fields) if len(found) == 1), None)


def _takes_text(field: Any, schema: Mapping[str, Any]) -> bool:
    return any(each.get("type") == "string" for each in _alternatives(field, schema))


def _alternatives(field: Any, schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schemas that a field may fit, with references to definitions followed (once, as pydantic writes them)."""
    if not isinstance(field, dict):
        return
    reference = field.get("$ref")
    if isinstance(reference, str):
        field = schema.get("$defs", {}).get(reference.removeprefix("#/$defs/"), {})
    choices = field.get("anyOf", field.get("oneOf"))
    for each in choices if isinstance(choices, list) else [field]:
        if isinstance(each, dict):
            yield each
