"""Training episodes: a session is lent, an agent plays in it, rewards may be recomputed; every end has an outcome."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, Protocol

from rollgym.clients.client.session import EnvSession
from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.trainer.core.errors import InvalidNumberError, PluginError, UnplayableTaskError
from rollgym.trainer.core.numbers import MOST_IDS, finite_number
from rollgym.trainer.core.plugins import Plugin
from rollgym.trainer.records.group import Group
from rollgym.trainer.records.rollout_log import EpisodeKey
from rollgym.trainer.records.timeline import Phase
from rollgym.trainer.records.trajectory import Outcome, Trajectory
from rollgym.trainer.rollout.actors import Actor, ContextOverflowError
from rollgym.trainer.rollout.agent import note_failure, play_episode, reward_parts
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.rollout.logged_session import EpisodeLostError, LoggedSession
from rollgym.trainer.rollout.mixtures import mix_reward
from rollgym.trainer.rollout.recall import EpisodeTape, Recall
from rollgym.trainer.rollout.record_check import ShownRecords, check_record
from rollgym.trainer.rollout.session import Session
from rollgym.trainer.tasks.task import Task


class BlackBox(Protocol):
    """Plays an episode with an agent that is not ours, and whose calls of the policy are recorded."""

    async def play(
        self, session: Session, task: Task, member: int, attempt: int, max_turns: int
    ) -> Trajectory:
        """Play one episode; anything that the agent does has an outcome."""
        ...


PlayInSession = Callable[[EnvSession], Awaitable[Trajectory]]
PlayEpisode = Callable[[Session, Task], Awaitable[Trajectory]]
"""Plays a task in a session, once."""


async def play_in_session(
    pool: EnvironmentPool, task: Task, play: PlayInSession, member: int = 0, attempt: int = 0
) -> Trajectory:
    """Lend a session and play in it. A session that cannot be made is an outcome like any other.

    Raises:
        ProblemError: If the server refuses what the run asks for (unknown environment, bad kwargs, wrong token).
    """
    asked, lent = time.monotonic(), None
    try:
        async with pool.session(task) as session:
            lent = time.monotonic()
            trajectory = await play(session)
    except (ProblemError, DecodeError, InvalidNumberError) as error:
        trajectory = Trajectory(task, member, attempt)
        # The session has already decided whether its problem can be retried: one that gets here is final.
        note_failure(trajectory, error, "make" if lent is None else "reset")
    await mix_reward(pool, trajectory)
    trajectory.timeline.queued(asked, time.monotonic() if lent is None else lent)
    return trajectory


@dataclass(frozen=True, slots=True)
class EpisodePlayer:
    """Plays the episodes that are trained on.

    Attributes:
        pool: The environments.
        make_actor: Makes the player of one episode.
        max_turns: Turns after which an episode is truncated.
        agent: A user's coroutine that plays in place of the built-in agent.
        reward: A user's function or coroutine that gives the turns their rewards.
        recall: The rollout log: replays earlier processes' episodes and records new ones; None without one.
        lost: Called with the task and the reason if an episode could not be resumed and restarts.
        differs: Called with the task and the difference if a replayed episode did not request all that the log has.
        black_box: Plays with an agent that is a program or a service, in place of the built-in agent.
        make_greedy: Makes the player of an episode that takes the most likely tokens.
        greedy_member: The member of each group that is played so; None for no member.
        vocabulary: Number of token ids that the model knows.
    """

    pool: EnvironmentPool
    make_actor: Callable[[], Actor]
    max_turns: int
    agent: Plugin | None = None
    reward: Plugin | None = None
    recall: Recall | None = None
    lost: Callable[[int, str], None] = lambda task, why: None
    black_box: BlackBox | None = None
    differs: Callable[[int, str], None] = lambda task, how: None
    make_greedy: Callable[[], Actor] | None = None
    greedy_member: int | None = None
    vocabulary: int = MOST_IDS

    async def play(self, task: Task, member: int, attempt: int) -> Trajectory:
        """Play one episode.

        Raises:
            PluginError: If the user's code raises, or returns an unreadable value.
            ProblemError: If the server refuses what the run asks for.
        """

        trajectory = await self._logged(task, member, attempt)
        if self.reward is not None and trajectory.outcome.is_result:
            try:
                with trajectory.timeline.during(Phase.VERIFY):
                    shown = ShownRecords([trajectory], self.reward)
                    given = await self.reward.answer(trajectory)
                    give_rewards([trajectory], [given], self.reward, shown)
            except InvalidNumberError as error:
                note_failure(trajectory, error)
        trajectory.timeline.end()
        return trajectory

    async def _logged(self, task: Task, member: int, attempt: int) -> Trajectory:
        if self.recall is None:
            return await self._play(task, member, attempt, None)
        with self.recall.playing(EpisodeKey(task.index, member, attempt)) as tape:
            if tape.ended is not None:
                outcome, detail = tape.ended
                return Trajectory(task, member, attempt, outcome=Outcome(outcome), detail=detail)
            trajectory = await self._play(task, member, attempt, tape)
            if unasked := tape.unasked():
                replies, tokens = unasked["unasked_replies"], unasked["unasked_tokens"]
                self.differs(task.index, f"member {member}: {replies} replies ({tokens} tokens) were in vain")
            if not trajectory.outcome.is_result:
                tape.end(trajectory)
            return trajectory

    async def _play(self, task: Task, member: int, attempt: int, tape: EpisodeTape | None) -> Trajectory:
        async def in_session(session: EnvSession) -> Trajectory:
            if tape is None:
                return await self._agent(session, task, member, attempt)
            return await self._go_on(session, tape, task, member, attempt)

        try:
            return await play_in_session(self.pool, task, in_session, member, attempt)
        except UnplayableTaskError as error:
            # Of a thousand rows one may be too long, or lack an answer. A run of days does not end with it.
            return Trajectory(task, member, attempt, outcome=Outcome.UNPLAYABLE, detail=str(error))

    async def _go_on(
        self, session: EnvSession, tape: EpisodeTape, task: Task, member: int, attempt: int
    ) -> Trajectory:
        """Play from the end of the log, or from the beginning if the environment cannot be brought there."""
        logged = LoggedSession(session, tape)
        try:
            trajectory = await self._agent(logged, task, member, attempt)
        except (EpisodeLostError, PluginError):
            if logged.lost is None:
                raise
        else:
            if logged.lost is None:
                return trajectory
        self.lost(task.index, f"member {member}: {logged.lost}")
        tape.cut(0)
        logged = LoggedSession(session, tape)
        return await self._agent(logged, task, member, attempt)

    async def _agent(self, session: Session, task: Task, member: int, attempt: int) -> Trajectory:
        if self.black_box is not None:
            return await self.black_box.play(session, task, member, attempt, self.max_turns)
        greedy = self.make_greedy if member == self.greedy_member else None
        actor = self.make_actor() if greedy is None else greedy()
        if self.agent is None:
            return await play_episode(session, task, member, actor, self.max_turns, attempt)
        return await play_coroutine(
            self.agent, session, task, member, actor, self.max_turns, attempt, vocabulary=self.vocabulary
        )


async def play_coroutine(
    agent: Plugin,
    session: Session,
    task: Task,
    member: int,
    actor: Actor,
    max_turns: int,
    attempt: int = 0,
    *,
    vocabulary: int = MOST_IDS,
) -> Trajectory:
    """Let a user's coroutine play an episode, and check its record.

    A problem response of its session, an unreadable answer, and a prompt without room for a reply are ordinary outcomes
    if the coroutine lets these errors propagate.

    Raises:
        PluginError: If it raises, or returns a record that is not consistent.
        ProblemError: If the server refuses what the run asks for.
        InvalidNumberError: If a number of the record is not finite, or an id is not in the model's vocabulary.
    """
    with agent.running():
        playing = agent.function(session, task, member, actor, max_turns, attempt)
        if not isawaitable(playing):
            raise agent.broken("must be a coroutine: write async def")
        try:
            trajectory = await playing
        except ContextOverflowError as overflow:  # the agent has dropped what was played
            return Trajectory(task, member, attempt, outcome=Outcome.AGENT_ERROR, detail=str(overflow))
        except (ProblemError, DecodeError) as error:
            failed = Trajectory(task, member, attempt)
            note_failure(failed, error)
            return failed
    if not isinstance(trajectory, Trajectory):
        raise agent.broken(f"must return a Trajectory, not {type(trajectory).__name__}")
    check_record(trajectory, agent, vocabulary)
    return trajectory


def give_rewards(
    trajectories: Sequence[Trajectory], given: Sequence[Any], reward: Plugin, shown: ShownRecords
) -> None:
    """Replace the turns' rewards by those of a user's.

    Args:
        trajectories: The episodes.
        given: For each of them, what the user's function returned: a number for each turn, or several by name.
        reward: The function.
        shown: The episodes as it was shown them.

    Raises:
        PluginError: If there are not as many as turns, or the function has changed the episodes.
        InvalidNumberError: If one of them is not finite.
    """
    of_episodes = [reward.elements(each, "one reward for each turn") for each in given]
    shown.check()  # generators have run now, too
    for trajectory, rewards in zip(trajectories, of_episodes, strict=True):
        if len(rewards) != len(trajectory.turns):
            raise reward.broken(f"returned {len(rewards)} rewards for {len(trajectory.turns)} turns")
        name = f"a reward of {reward.path}"
        parts = [reward_parts(value if isinstance(value, Mapping) else None, name) for value in rewards]
        numbers = [
            finite_number(sum(part.values()) if part else value, name)
            for part, value in zip(parts, rewards, strict=True)
        ]
        for turn, part, value in zip(trajectory.turns, parts, numbers, strict=True):
            turn.reward, turn.reward_parts = value, part


def group_reward(reward: Plugin) -> Callable[[Group], Awaitable[None]]:
    """Return what gives the episodes of a whole group their rewards.

    Args:
        reward: A user's function or coroutine: the group's episodes in, for each of them a number for each turn
            out.
    """

    async def judge(group: Group) -> None:
        shown = ShownRecords(group.trajectories, reward)
        given = reward.elements(await reward.answer([*group.trajectories]), "the rewards of each episode")
        if len(given) != len(group.trajectories):
            raise reward.broken(f"returned rewards of {len(given)} episodes for {len(group.trajectories)}")
        give_rewards(group.trajectories, given, reward, shown)

    return judge
