"""An episode that an external agent plays: it gets an address, and anything that it does has an outcome."""

import math
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.trainer.core.errors import InvalidNumberError
from rollgym.trainer.core.numbers import LARGEST, finite_number
from rollgym.trainer.records.trajectory import Trajectory, TrajectoryOutcome
from rollgym.trainer.rollout.agent import Session, note_failure
from rollgym.trainer.rollout.agents.endpoint import agents_app
from rollgym.trainer.rollout.agents.environment import FAILURES, EpisodeEnvironment
from rollgym.trainer.rollout.agents.errors import ApiError
from rollgym.trainer.rollout.agents.http import serve_app
from rollgym.trainer.rollout.agents.policy_service import PolicyService
from rollgym.trainer.rollout.agents.runners import AgentEnd, AgentRunner, AgentTask
from rollgym.trainer.rollout.agents.session import AgentSession
from rollgym.trainer.tasks.task import Task

_REMEMBERED = 4096
"""How many keys of ended sessions are remembered, to distinguish them from unknown ones."""


@dataclass(frozen=True, slots=True)
class _Open:
    session: AgentSession
    environment: EpisodeEnvironment | None


class SessionTable:
    """Sessions by key.

    Args:
        model: The name that the policy has in the API.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self._open: dict[str, _Open] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, session: AgentSession, environment: EpisodeEnvironment | None = None) -> str:
        """Open a session and return its key."""
        key = secrets.token_urlsafe(24)
        self._open[key] = _Open(session, environment)
        return key

    def remove(self, key: str) -> None:
        """End a session: cancel its requests, and remember its key, to distinguish it from an unknown one."""
        found = self._open.pop(key, None)
        if found is not None:
            found.session.end()
            self._ended[key] = None
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

    def session(self, key: str) -> AgentSession:
        """Return a session.

        Raises:
            ApiError: The session is unknown, or has ended.
        """
        return self._found(key).session

    def environment(self, key: str) -> EpisodeEnvironment | None:
        """Return the environment of a session; None if it has none."""
        return self._found(key).environment

    def posted(self, key: str) -> None:
        """Do nothing: the opener of the session waits for its end."""

    def _found(self, key: str) -> _Open:
        found = self._open.get(key)
        if found is None:
            if key in self._ended:
                raise ApiError(410, "the episode of this session has ended", "session_ended")
            raise ApiError(404, "there is no session of this key", "unknown_session")
        return found


@dataclass(frozen=True, slots=True)
class BlackBoxPlayer:
    """Plays episodes with an agent that speaks OpenAI's API.

    Attributes:
        table: The endpoint's sessions.
        url: The endpoint's address, as the agent reaches it.
        service: Answers the agent's requests.
        runner: Sets the agent to work.
        clock: Unix time.
    """

    table: SessionTable
    url: str
    service: PolicyService
    runner: AgentRunner
    clock: Callable[[], float]

    async def play(
        self, session: Session, task: Task, member: int, attempt: int, max_turns: int
    ) -> Trajectory:
        """Play one episode.

        Raises:
            ProblemError: If the server refuses what the run asks for.
            EpisodeLostError: If the environment cannot be brought to the end of the rollout log.
        """
        trajectory = Trajectory(task, member, attempt)
        agent = AgentSession(self.service, trajectory, max_turns, self.clock)
        environment = EpisodeEnvironment(session, trajectory, failed=agent.end)
        try:
            await environment.reset()
        except (ProblemError, DecodeError, InvalidNumberError) as error:
            note_failure(trajectory, error, "reset")
            return trajectory
        key = self.table.add(agent, environment)
        try:
            told = AgentTask(f"{self.url}/s/{key}", key, self.service.model, _told(environment, trajectory))
            end = await self.runner.run(told, agent)
        finally:
            self.table.remove(key)
        # The session moves on to another episode, and no step of this one may still be in flight in it.
        await environment.close()
        conclude(trajectory, agent, environment, end, max_turns)
        return trajectory


@asynccontextmanager
async def open_black_box(
    service: PolicyService,
    runner: AgentRunner,
    clock: Callable[[], float],
    *,
    host: str,
    port: int,
    public_url: str | None,
    max_body_bytes: int,
    unix: Path | None = None,
) -> AsyncIterator[BlackBoxPlayer]:
    """Serve the endpoint while the context is open, and give the player that uses it; see `serve_app`."""
    table = SessionTable(service.model)
    try:
        async with serve_app(agents_app(table, max_body_bytes), host, port, unix) as url:
            yield BlackBoxPlayer(table, (public_url or url).rstrip("/"), service, runner, clock)
    finally:
        await runner.close()


def _told(environment: EpisodeEnvironment, trajectory: Trajectory) -> dict[str, Any]:
    """What an agent receives of its task. The task's own fields may hold the answer, and stay here."""
    seen = environment.seen
    return {
        "env_id": environment.env_id,
        "index": trajectory.task.index,
        "member": trajectory.member,
        "attempt": trajectory.attempt,
        "instruction": environment.instruction,
        "observation": seen.text,
        "messages": [dict(message) for message in seen.messages],
        "tools": [dict(tool) for tool in environment.tools],
    }


def conclude(
    trajectory: Trajectory,
    agent: AgentSession,
    environment: EpisodeEnvironment,
    end: AgentEnd,
    max_turns: int,
) -> None:
    """Give an episode its rewards and its outcome, once the agent is done.

    The environment's decision stands, regardless of the agent's later actions; then what the agent has posted; and only
    then how the agent ended.

    Raises:
        EpisodeLostError: If the environment cannot be brought to the end of the rollout log.
        Exception: An error of the inference client, or of a step without a server: the episode could not be played.
    """
    counts = agent.counts
    trajectory.metrics = trajectory.metrics | {
        "agent_calls": float(counts.calls),
        "agent_refused": float(counts.refused),
        "agent_abandoned": float(counts.abandoned),
        "agent_rewritten": float(counts.rewritten),
    }
    failure = environment.failure
    if failure is not None and not isinstance(failure, FAILURES):
        raise failure
    if agent.model_failure is not None:
        if not isinstance(agent.model_failure, InvalidNumberError):
            raise agent.model_failure
        failure = agent.model_failure
    try:
        if failure is None:
            give_posted(trajectory, agent, end)
    except InvalidNumberError as error:
        failure = error
    if failure is not None:
        note_failure(trajectory, failure)
    elif not trajectory.turns:
        why = end.failure or "the agent ended without an answer of the policy"
        trajectory.outcome, trajectory.detail = TrajectoryOutcome.AGENT_ERROR, why
    elif not environment.seen.over:
        trajectory.outcome, trajectory.detail = unfinished(agent, end, max_turns)


def give_posted(trajectory: Trajectory, agent: AgentSession, end: AgentEnd) -> None:
    """Give an episode the rewards that its agent has posted, or answered at its end.

    Raises:
        InvalidNumberError: If one of them is not finite.
    """
    posted = agent.posted
    if end.posted:
        if end.posted.get("reward") is not None:
            posted.reward = finite_number(end.posted["reward"], "the reward that the agent answered")
            posted.faults.discard(None)
        if isinstance(end.posted.get("success"), bool):
            posted.success = end.posted["success"]
    if posted.faults:
        raise InvalidNumberError("the agent posted a reward that is no number to compute with")
    for call, reward in posted.turns.items():
        agent.turns_of[call][-1].reward = reward
    if posted.reward is not None and trajectory.turns:
        trajectory.turns[-1].reward += posted.reward
    if not math.isfinite(total := trajectory.total_reward) or abs(total) > LARGEST:
        raise InvalidNumberError(f"the episode's rewards add up to {total:g}")


def unfinished(agent: AgentSession, end: AgentEnd, max_turns: int | None) -> tuple[TrajectoryOutcome, str]:
    """Return the outcome of an episode that no environment has ended, and a word on it."""
    posted = agent.posted
    if posted.reward is not None or posted.success is not None or posted.turns:
        return (
            TrajectoryOutcome.SOLVED if posted.success else TrajectoryOutcome.FAILED
        ), "as the agent posted"
    if agent.counts.overflows:
        return TrajectoryOutcome.CONTEXT_OVERFLOW, "a prompt of the agent left no room for a reply"
    if max_turns is not None and agent.counts.calls >= max_turns:
        return TrajectoryOutcome.TRUNCATED, f"max_turns {max_turns} reached"
    if end.failure:
        return TrajectoryOutcome.AGENT_ERROR, end.failure
    return (
        TrajectoryOutcome.TRUNCATED,
        "the agent ended before its environment's episode did, and posted no reward",
    )
