"""The answers of handlers, as plain data for one encoding."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from gymnasium import Space
from gymnasium.spaces import Discrete, GraphInstance

from rollgym.clients.protocol.arrays import INTEGER_LIMIT
from rollgym.clients.protocol.spaces import UnicodeText, describe_space
from rollgym.clients.protocol.values import EncodeError, encode_value
from rollgym.env_server.access.context import Context
from rollgym.env_server.sessions.session import LocalSession, ResetRecord, StepRecord
from rollgym.env_server.workers.base import StepOutcome

Reply = dict[str, Any]

_DEEPEST = 200
"""Levels of a value that the wire carries."""

_PLAIN_ONLY = (
    orjson.OPT_STRICT_INTEGER
    | orjson.OPT_PASSTHROUGH_SUBCLASS
    | orjson.OPT_PASSTHROUGH_DATACLASS
    | orjson.OPT_PASSTHROUGH_DATETIME
)


def encode_observation(space: Space[Any], observation: Any, *, binary: bool) -> Any:
    """An observation for the wire; plain text and small integers, the hot path, pass as they are."""
    kind = type(observation)
    if kind is str:
        if type(space) is UnicodeText and observation.isascii():
            return observation
    elif kind is int and type(space) is Discrete and -INTEGER_LIMIT < observation < INTEGER_LIMIT:
        return observation
    return encode_given(space, observation, binary=binary)


def encode_given(space: Space[Any] | None, value: Any, *, binary: bool) -> Any:
    """Something that an environment gave, for the wire.

    Raises:
        EncodeError: It has no form there. Objects of the environment may raise anything while they are looked at.
    """
    try:
        return encode_value(space, value, binary=binary)
    except EncodeError:
        raise
    except Exception as error:
        raise EncodeError(f"what it gave cannot be read: {type(error).__name__}") from error


def detached(value: Any, depth: int = 0) -> Any:
    """Copy arrays and plain containers, which the environment may modify later; other objects stay as they are.

    No code of the environment runs: no object's copy method is called. Values nested too deeply to be sent stay as they
    are.
    """
    kind = type(value)
    if depth > _DEEPEST:
        return value
    if kind is np.ndarray:
        return value.copy()
    if kind is dict or kind is OrderedDict:
        return {key: detached(item, depth + 1) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(detached(item, depth + 1) for item in value)
    if kind is GraphInstance:
        return GraphInstance(*(detached(item, depth + 1) for item in value))
    return value


def encode_info(info: Mapping[str, Any], context: Context) -> Any:
    """An info for the wire.

    Infos are nested and come with every step, so for JSON they are serialised here at once, and the answer holds the
    bytes. This serialiser cannot distinguish NaN from None; an info with either, or with other than plain data, takes
    the slow path.
    """
    if context.fragments:
        try:
            content = orjson.dumps(info, option=_PLAIN_ONLY)
        except TypeError:
            content = b"null"
        if b"null" not in content:
            return orjson.Fragment(content)
    return encode_given(None, info, binary=context.binary)


def reset_reply(space: Space[Any], record: ResetRecord, context: Context) -> Reply:
    """The answer to a reset.

    Raises:
        EncodeError: If the environment gave something that has no form on the wire.
    """
    return {
        "observation": encode_observation(space, record.observation, binary=context.binary),
        "info": encode_info(record.info, context),
        "episode": record.episode,
        "step": 0,
        "seed": record.seed,
    }


def step_reply(session: LocalSession, record: StepRecord, outcome: StepOutcome, context: Context) -> Reply:
    """The answer to a step.

    Raises:
        EncodeError: If the environment gave something that has no form on the wire.
    """
    reply = {
        "observation": encode_observation(session.observation_space, outcome.observation, binary=True)
        if context.binary
        else record.seen,
        "reward": outcome.reward,
        "terminated": outcome.terminated,
        "truncated": outcome.truncated,
        "info": encode_info(outcome.info, context),
        "episode": record.episode,
        "step": record.step + 1,
    }
    if record.reset is not None:
        reply["reset"] = reset_reply(session.observation_space, record.reset, context)
    return reply


def opened_sessions(reply: Mapping[str, Any]) -> list[str]:
    """The sessions that an answer has opened, if it is one to make, fork or restore."""
    made = [each for each in (reply, *reply.get("sessions", ())) if "action_space" in each]
    return [*reply.get("session_ids", ()), *(each["session_id"] for each in made if "session_id" in each)]


def session_reply(session: LocalSession) -> Reply:
    """The answer to a call that makes a session."""
    return {
        "session_id": session.session_id,
        "env_id": session.entry.env_id,
        "action_space": describe_space(session.action_space),
        "observation_space": describe_space(session.observation_space),
    }
