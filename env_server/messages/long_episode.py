"""Episodes that come from elsewhere, validated in slices of the event loop's time where they are long."""

import asyncio
from collections.abc import Mapping
from time import perf_counter
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from rollgym.clients.protocol.episode import Digest, PortableEpisode, Reseed
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import RestoreRequest
from rollgym.env_server.common.event_loop import SLICE_S
from rollgym.env_server.messages.validation import episode_in_json, misfit_problem, requested

_MANY = 4096
_STRICT = ConfigDict(strict=True)
# Anything may be an action.
_LISTS: Mapping[str, TypeAdapter[list[Any]] | None] = {
    "actions": None,
    "digests": TypeAdapter(Annotated[list[Digest], Field(fail_fast=True)], config=_STRICT),
    "reseeds": TypeAdapter(Annotated[list[Reseed], Field(fail_fast=True)], config=_STRICT),
}


async def restore_request(fields: Mapping[str, Any]) -> RestoreRequest:
    """The request that the fields of an operation are.

    Raises:
        ProblemError: `invalid_request`, with the fields and reasons in `errors`.
    """
    episode = fields.get("episode")
    if type(episode) is not dict:
        return requested(RestoreRequest, fields)
    given = {name: episode.get(name) for name in _LISTS}
    if not any(type(each) is list and len(each) > _MANY for each in given.values()):
        return requested(RestoreRequest, fields)
    lists = {name: each for name, each in given.items() if type(each) is list}
    short = {**fields, "episode": {**episode, **{name: [] for name in lists}}}
    request = requested(RestoreRequest, short)
    for name, values in lists.items():
        lists[name] = await _validated(name, values)
    whole = request.episode.model_copy(update=lists)
    try:
        whole.refuse_misfit()
    except ValueError as error:
        raise misfit_problem([(("episode",), f"Value error, {error}")]) from error
    return request.model_copy(update={"episode": whole})


async def episode_of(reply: Mapping[str, Any], env_id: str) -> PortableEpisode:
    """The portable episode that another server has answered with.

    Args:
        reply: The answer.
        env_id: What the environment is called here.

    Raises:
        ValueError: It is none.
    """
    try:
        request = await restore_request({"episode": {**reply, "env_id": env_id}})
    except ProblemError as problem:
        raise ValueError(f"this is no episode: {problem}") from problem
    return request.episode


async def long_episode_in_json(episode: PortableEpisode) -> PortableEpisode:
    """A portable episode in JSON's encoding; a long one is encoded in a thread.

    Raises:
        ProblemError: `invalid_request` or `invalid_kwargs`.
    """
    if len(episode.actions) < _MANY:
        return episode_in_json(episode)
    return await asyncio.to_thread(episode_in_json, episode)


async def _validated(name: str, values: list[Any]) -> list[Any]:
    form = _LISTS[name]
    if form is None:
        return values
    found: list[Any] = []
    end = perf_counter() + SLICE_S
    for first in range(0, len(values), _MANY):
        try:
            found += form.validate_python(values[first : first + _MANY])
        except ValidationError as error:
            raise _misfit(name, first, error) from error
        if perf_counter() >= end:
            await asyncio.sleep(0)
            end = perf_counter() + SLICE_S
    return found


def _misfit(name: str, first: int, error: ValidationError) -> ProblemError:
    """The problem with one of the values from an index on."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return misfit_problem(
        [
            (("episode", name, first + int(at), *rest), each["msg"])
            for each in found
            for at, *rest in [each["loc"]]
        ]
    )
