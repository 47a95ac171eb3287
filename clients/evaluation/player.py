"""Plays episodes of an environment with a model, several at a time.

In their conversation, replies become actions and observations become messages.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gymnasium import spaces

from rollgym.clients.client.client import EnvClient
from rollgym.clients.client.session import EnvSession
from rollgym.clients.evaluation.chat import ChatModel, EndpointError, Failure, ModelReply, ReplyError
from rollgym.clients.evaluation.summary import EpisodeOutcome, EvaluatedEpisode, EvaluatedTurn
from rollgym.clients.protocol.arrays import DecodeError, EncodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import EnvInfo
from rollgym.clients.protocol.spaces import UnicodeText, parse_space
from rollgym.clients.protocol.tool_calls import (
    ToolCall,
    ToolDeclaration,
    answer_text,
    call_format_of,
    other_messages,
    tool_results,
)
from rollgym.clients.replies.formats.calls import UnwritableCallError, parse_arguments
from rollgym.clients.replies.formats.table import declared_tools, written_calls
from rollgym.clients.replies.json_values import CallFault


class Conversation:
    """The messages of one episode.

    Args:
        observation: The first observation.
        info: The `info` of the reset: its instruction, and its tools if the environment has any.
        system: A system message that comes first; none if empty.

    Attributes:
        messages: As a chat API takes them.
        tools: The declared tools; empty if it is played by text alone.
    """

    def __init__(self, observation: str, info: Mapping[str, Any], system: str = "") -> None:
        self.messages: list[dict[str, Any]] = []
        self.tools: list[ToolDeclaration] = declared_tools(info)
        self._call_format = call_format_of(info)
        self._reply = ModelReply()
        if system:
            self.messages.append({"role": "system", "content": system})
        # If the API offers the tools, instructions for calls as text would only mislead.
        told = info.get("rules", info.get("instruction")) if self.tools else info.get("instruction")
        opening = [str(told)] if told else []
        self.messages.append({"role": "user", "content": "\n\n".join([*opening, observation])})

    def hear(self, reply: ModelReply) -> str | None:
        """Add a reply of the model, and return the action that it stands for.

        Returns:
            The action; None if the arguments of a call cannot be read, in which case the model gets an error message.
        """
        self._reply = reply
        self.messages.append(reply.as_message())
        if not reply.calls:
            return reply.content
        calls = []
        for call in reply.calls:
            try:
                arguments = parse_arguments(call.arguments or "{}", strict=False)
            except CallFault as fault:
                self._answer_calls([f"error: the arguments are not a JSON object: {fault}. Nothing was run."])
                return None
            calls.append(ToolCall(call.name, arguments, call.call_id))
        schemas = {tool.name: tool.parameters for tool in self.tools}
        try:
            return written_calls(self._call_format, calls, reply.content, schemas)
        except UnwritableCallError as error:
            self._answer_calls([f"error: {error}. Nothing was run."])
            return None

    def observe(self, observation: str, info: Mapping[str, Any]) -> None:
        """Add the environment's answer to the last action."""
        if not self._reply.calls:
            self.messages.append({"role": "user", "content": answer_text(observation, info)})
            return
        results = tool_results(info)
        if len(results) != len(self._reply.calls):
            self._answer_calls([answer_text(observation, info)])
            return
        self._answer_calls(results)
        if others := other_messages(info):
            self.messages.append({"role": "user", "content": "\n".join(others)})

    def _answer_calls(self, results: list[str]) -> None:
        """Answer each call; those that have no result of their own were not run."""
        for index, call in enumerate(self._reply.calls):
            content = results[index] if index < len(results) else "not run"
            self.messages.append({"role": "tool", "tool_call_id": call.call_id, "content": content})


class NotPlayableError(Exception):
    """The environment cannot be played by text."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The settings of an evaluation.

    Attributes:
        env_id: An environment of the server's catalog.
        env_kwargs: The kwargs that it is made with.
        seeds: One episode each.
        max_turns: Replies after which an episode is cut off.
        concurrency: Episodes at a time.
        system: A system message; none if empty.
    """

    env_id: str
    seeds: Sequence[int]
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int = 64
    concurrency: int = 8
    system: str = ""


async def evaluate(
    client: EnvClient,
    model: ChatModel,
    evaluation: Evaluation,
    finished: Callable[[EvaluatedEpisode], None],
) -> None:
    """Play every seed.

    Args:
        client: The environment's server.
        model: The model, entered.
        evaluation: The settings of the evaluation.
        finished: Takes each episode when it ends, in the order in which they end.

    Raises:
        EndpointError: No request to the model can succeed.
        NotPlayableError: The environment's actions or observations are not text.
        ProblemError: The server refuses to make the environment.
    """
    env = await client.env(evaluation.env_id)
    _check_text(env)
    kwargs = _with_calls_of_the_api(env, evaluation.env_kwargs)
    # The first session shows whether the kwargs are valid, before the first request to the model.
    first = await client.make(evaluation.env_id, kwargs)
    episodes = iter(enumerate(evaluation.seeds))
    players = [
        _Player(client, model, evaluation, kwargs, first if number == 0 else None)
        for number in range(min(evaluation.concurrency, len(evaluation.seeds)))
    ]
    try:
        async with asyncio.TaskGroup() as group:
            for player in players:
                group.create_task(player.play_all(episodes, finished))
    except* (EndpointError, ProblemError, ConnectionError, TimeoutError, OSError) as errors:
        # Many workers may meet the same; one says it.
        raise _first(errors) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _check_text(env: EnvInfo) -> None:
    """Refuse an environment that text cannot play.

    Raises:
        NotPlayableError: The environment's actions or observations are not text.
    """
    for what, described in (("actions", env.action_space), ("observations", env.observation_space)):
        space = parse_space(described)
        if not isinstance(space, UnicodeText | spaces.Text):
            raise NotPlayableError(
                f"the {what} of {env.env_id} are {type(space).__name__}, not text; a Gymnasium environment is "
                "served as text with --gymnasium-text ID"
            )


def _with_calls_of_the_api(env: EnvInfo, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Let an environment with tools read calls in the API's form, if it can and the caller sets no other form."""
    schema = env.kwargs_schema or {}
    takes_format = "call_format" in (schema.get("properties") or {})
    return ({"call_format": "openai"} if takes_format else {}) | dict(kwargs)


class _Player:
    """Plays one episode after another, in a session of its own."""

    def __init__(
        self,
        client: EnvClient,
        model: ChatModel,
        evaluation: Evaluation,
        kwargs: Mapping[str, Any],
        session: EnvSession | None,
    ) -> None:
        self._client = client
        self._model = model
        self._evaluation = evaluation
        self._kwargs = kwargs
        self._session = session

    async def play_all(
        self, episodes: Iterator[tuple[int, int]], finished: Callable[[EvaluatedEpisode], None]
    ) -> None:
        for index, seed in episodes:
            episode = EvaluatedEpisode(index, seed)
            began = time.perf_counter()
            try:
                await self._play(episode)
            except ReplyError as error:
                overflow = error.failure is Failure.CONTEXT
                episode.outcome = EpisodeOutcome.CONTEXT_OVERFLOW if overflow else EpisodeOutcome.AGENT_ERROR
                episode.failure, episode.detail = error.failure, f"{error.failure.value}: {error}"
            except (ProblemError, DecodeError, EncodeError) as error:
                if self._session is None:
                    raise
                of_the_model = isinstance(error, ProblemError) and _is_of_the_reply(error)
                episode.outcome = EpisodeOutcome.FAILED if of_the_model else EpisodeOutcome.ENVIRONMENT_ERROR
                episode.detail = str(error)
                if of_the_model and episode.turns:
                    episode.turns[-1].valid = False
                await self._give_up_session()
            episode.seconds = time.perf_counter() - began
            finished(episode)

    async def _give_up_session(self) -> None:
        if self._session is not None:
            with suppress(ProblemError, DecodeError):
                await self._client.close_sessions([self._session])
        self._session = None

    async def _play(self, episode: EvaluatedEpisode) -> None:
        if self._session is None:
            self._session = await self._client.make(self._evaluation.env_id, self._kwargs)
        observation, info = await self._session.reset(episode.seed)
        # Until the environment says otherwise, whatever ends the episode.
        episode.success = None if info.get("success") is None else False
        conversation = Conversation(observation, info, self._evaluation.system)
        episode.messages = conversation.messages
        tools = [tool.as_openai() for tool in conversation.tools]
        for _ in range(self._evaluation.max_turns):
            shown = str(conversation.messages[-1]["content"])
            reply = await self._model.reply(conversation.messages, tools)
            turn = EvaluatedTurn(shown, reply, anchor=_text(info.get("anchor")))
            episode.turns.append(turn)
            turn.action = conversation.hear(reply)
            if turn.action is None:
                turn.valid = False
                continue
            observation, reward, terminated, truncated, info = await self._session.step(turn.action)
            conversation.observe(observation, info)
            if not math.isfinite(reward):
                episode.outcome, episode.detail = EpisodeOutcome.INVALID_NUMBER, f"the reward is {reward}"
                return
            turn.reward = reward
            turn.valid = info.get("action_is_valid") is not False
            turn.format_penalty = _number(info.get("format_penalty")) or 0.0
            if terminated or truncated:
                _end(episode, info, terminated=terminated)
                return
        episode.outcome, episode.detail = (
            EpisodeOutcome.TRUNCATED,
            f"cut off after {self._evaluation.max_turns} turns",
        )
        episode.metrics = _metrics(info)


def _end(episode: EvaluatedEpisode, info: Mapping[str, Any], *, terminated: bool) -> None:
    success = info.get("success")
    episode.success = None if success is None else bool(success)
    if episode.success:
        episode.outcome = EpisodeOutcome.SOLVED
    else:
        episode.outcome = EpisodeOutcome.FAILED if terminated else EpisodeOutcome.TRUNCATED
    episode.metrics = _metrics(info)


def _metrics(info: Mapping[str, Any]) -> dict[str, float]:
    metrics = info.get("metrics")
    if not isinstance(metrics, Mapping):
        return {}
    return {str(name): number for name, value in metrics.items() if (number := _number(value)) is not None}


def _number(value: Any) -> float | None:
    """Return a finite number; None for everything else."""
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, int | float) or abs(value) > 1e300 or not math.isfinite(value):
        return None
    return float(value)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _is_of_the_reply(problem: ProblemError) -> bool:
    """Whether the model's reply is the cause: an answer of the environment may be too large, too."""
    is_too_long = problem.code == "too_large" and problem.extra.get("part") != "reply"
    return problem.kind.fault == "action" or is_too_long
