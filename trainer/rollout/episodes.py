"""Training episodes: a session is lent, an agent plays in it, rewards may be recomputed; every end has an outcome.

Rewards may combine several verifiers: each is called over the wire once the response is complete.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, Protocol

from rollgym.clients.client.session import EnvSession
from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import VerdictReply
from rollgym.trainer.core.errors import InvalidNumberError, PluginError, UnplayableTaskError
from rollgym.trainer.core.numbers import MOST_IDS, finite_number
from rollgym.trainer.core.plugins import Plugin
from rollgym.trainer.records.group import Group
from rollgym.trainer.records.rollout_log import EpisodeKey
from rollgym.trainer.records.trajectory import Phase, Trajectory, TrajectoryOutcome
from rollgym.trainer.rollout.actors import Actor, ContextOverflowError
from rollgym.trainer.rollout.agent import FAULTS, Session, note_failure, play_episode, reward_parts
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.rollout.log_replay import EpisodeLostError, EpisodeReplay, LoggedSession, LogReplay
from rollgym.trainer.rollout.recorder import ShownRecords, check_record
from rollgym.trainer.tasks.task import RewardMixture, RewardPart, Task


async def _mix_reward(pool: EnvironmentPool, trajectory: Trajectory) -> None:
    """Give the last turn of an episode the weighted sum of all scores, with each part by its name.

    If a verifier cannot decide, such as a judge that is down, the episode fails and is played again; its score is never
    0. A response that does not pass a gate earns nothing, and the verifiers behind the gate are not called.

    Args:
        pool: The environments, which include the verifiers.
        trajectory: The episode; unchanged if its task has no mixture, or its outcome is not a result.

    Raises:
        ProblemError: If a server refuses the request (unknown verifier, fields that it does not understand).
    """
    mixture = trajectory.task.mixture
    if mixture is None or not trajectory.outcome.is_result or not trajectory.turns:
        return
    try:
        with trajectory.timeline.during(Phase.VERIFY):
            verdicts = await _verdicts(pool, mixture, trajectory)
        _pay(trajectory, mixture, verdicts)
    except (ProblemError, DecodeError, InvalidNumberError) as error:
        note_failure(trajectory, error)


async def _verdicts(
    pool: EnvironmentPool, mixture: RewardMixture, trajectory: Trajectory
) -> dict[str, VerdictReply]:
    """Call the gates in sequence, then all other verifiers concurrently; stop at the first gate that fails."""
    found: dict[str, VerdictReply] = {}
    for part in mixture.parts:
        if part.gate is None:
            continue
        verdict = found[part.name] = await _ask(pool, part, trajectory)
        if verdict.outcome in FAULTS or verdict.score < part.gate - 1e-9:
            return found
    others = [part for part in mixture.parts if part.gate is None]
    asked = await asyncio.gather(*(_ask(pool, part, trajectory) for part in others))
    return found | {part.name: verdict for part, verdict in zip(others, asked, strict=True)}


async def _ask(pool: EnvironmentPool, part: RewardPart, trajectory: Trajectory) -> VerdictReply:
    client = await pool.client(part.url)
    item = item_of(part, trajectory.task, trajectory.steps[-1].reply)
    (verdict,) = await client.verify(part.verifier, [item])
    return verdict


def item_of(part: RewardPart, task: Task, response: str) -> Mapping[str, Any]:
    """Return a verifier's input: the task's fields, renamed as it needs them, and the response."""
    fields = dict(task.options or {})
    renamed = {name: fields[source] for name, source in part.fields.items() if source in fields}
    return {**fields, **renamed, **part.task, "response": response}


def _pay(trajectory: Trajectory, mixture: RewardMixture, verdicts: Mapping[str, VerdictReply]) -> None:
    turn, own = trajectory.steps[-1], trajectory.task.env_id
    for name, verdict in verdicts.items():
        if verdict.outcome in FAULTS:
            trajectory.outcome = FAULTS[verdict.outcome]
            trajectory.detail = f"the verifier {name} could not tell: {verdict.detail}"
            return
    shares = {own: mixture.own * turn.reward}
    for part in mixture.parts:
        if part.name in verdicts:
            score = finite_number(verdicts[part.name].score, f"a score of {part.verifier}")
            shares[part.name] = shares.get(part.name, 0.0) + part.weight * score
    if len(verdicts) < len(mixture.parts) or any(
        part.gate is not None and verdicts[part.name].score < part.gate - 1e-9 for part in mixture.parts
    ):
        shares = {own: 0.0} | {part.name: 0.0 for part in mixture.parts}
    # A weight may be any number, and a finite score times it none.
    turn.reward = finite_number(sum(shares.values()), "the weighted sum of an episode's scores")
    turn.reward_parts = shares
    for name, share in shares.items():
        trajectory.metrics[f"reward/{name}"] = share


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
    await _mix_reward(pool, trajectory)
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
        log_replay: The rollout log: replays earlier processes' episodes and records new ones; None without one.
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
    log_replay: LogReplay | None = None
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
        if self.log_replay is None:
            return await self._play(task, member, attempt, None)
        with self.log_replay.playing(EpisodeKey(task.index, member, attempt)) as replay:
            if replay.ended is not None:
                outcome, detail = replay.ended
                return Trajectory(task, member, attempt, outcome=TrajectoryOutcome(outcome), detail=detail)
            trajectory = await self._play(task, member, attempt, replay)
            if unused := replay.unused_replies():
                replies, tokens = unused["unasked_replies"], unused["unasked_tokens"]
                self.differs(task.index, f"member {member}: {replies} replies ({tokens} tokens) were in vain")
            if not trajectory.outcome.is_result:
                replay.end(trajectory)
            return trajectory

    async def _play(self, task: Task, member: int, attempt: int, replay: EpisodeReplay | None) -> Trajectory:
        async def in_session(session: EnvSession) -> Trajectory:
            if replay is None:
                return await self._agent(session, task, member, attempt)
            return await self._go_on(session, replay, task, member, attempt)

        try:
            return await play_in_session(self.pool, task, in_session, member, attempt)
        except UnplayableTaskError as error:
            # Of a thousand rows one may be too long, or lack an answer. A run of days does not end with it.
            return Trajectory(task, member, attempt, outcome=TrajectoryOutcome.UNPLAYABLE, detail=str(error))

    async def _go_on(
        self, session: EnvSession, replay: EpisodeReplay, task: Task, member: int, attempt: int
    ) -> Trajectory:
        """Play from the end of the log, or from the beginning if the environment cannot be brought there."""
        logged = LoggedSession(session, replay)
        try:
            trajectory = await self._agent(logged, task, member, attempt)
        except (EpisodeLostError, PluginError):
            if logged.lost is None:
                raise
        else:
            if logged.lost is None:
                return trajectory
        self.lost(task.index, f"member {member}: {logged.lost}")
        replay.cut(0)
        logged = LoggedSession(session, replay)
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
            return Trajectory(
                task, member, attempt, outcome=TrajectoryOutcome.AGENT_ERROR, detail=str(overflow)
            )
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
