"""Measure a policy on fixed evaluation sets, with the random and the blind baseline beside it.

Demonstrations of an expert are collected in the same way, over the wire, as records like any other.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rollgym.clients.measuring.statistics import Interval, mean_interval, success_rate
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.spaces import parse_space
from rollgym.trainer.config.data import EvaluationSetSettings
from rollgym.trainer.core.errors import RunError
from rollgym.trainer.core.seeding import generator
from rollgym.trainer.evaluation.evaluation_sets import EvaluationSet
from rollgym.trainer.inference.base import GenerationResult
from rollgym.trainer.records.trajectory import Trajectory, TrajectoryOutcome, Turn
from rollgym.trainer.rollout.actors import Actor, ExpertActor, RandomActor, ScriptedActor, View
from rollgym.trainer.rollout.agent import Session, play_episode
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.rollout.episodes import PlayEpisode, play_in_session
from rollgym.trainer.rollout.prompts import PromptBuilder
from rollgym.trainer.rollout.recorder import Recorder
from rollgym.trainer.rollout.slots import EpisodeSlots, Slot
from rollgym.trainer.tasks.task import Task, TaskSource

MakeActor = Callable[[Task], Actor]
_CONCURRENCY = 256
_BLIND_CANDIDATES = 8
_BLIND_TASKS = 200


class NoResultError(RunError):
    """No episode ended with a result; the message lists their outcomes."""


class NoBlindBaselineError(Exception):
    """No fixed sequence of actions is available to play; the message says why."""


@dataclass(frozen=True, slots=True)
class Score:
    """A player's results on an evaluation set.

    Attributes:
        success: Success rate with its 95 % interval, over episodes that ended with a result.
        reward: Mean episode reward with its 95 % interval.
        turns: Mean number of turns.
        episodes: Episodes that ended with a result.
        failures: Episodes that the environment failed; they are in none of the means.
    """

    success: Interval
    reward: Interval
    turns: float
    episodes: int
    failures: int

    def as_metrics(self, prefix: str) -> dict[str, float]:
        """Return the score as named numbers."""
        return {
            f"{prefix}/success": self.success.value,
            f"{prefix}/success_low": self.success.low,
            f"{prefix}/success_high": self.success.high,
            f"{prefix}/reward": self.reward.value,
            f"{prefix}/turns": self.turns,
            f"{prefix}/episodes": float(self.episodes),
            f"{prefix}/failures": float(self.failures),
        }


async def play_tasks(
    tasks: Sequence[Task],
    make_actor: MakeActor,
    pool: EnvironmentPool,
    max_turns: int,
    concurrency: int = _CONCURRENCY,
) -> list[Trajectory]:
    """Play every task once with a player that decides turn by turn; see `play_each`."""

    async def play(session: Session, task: Task) -> Trajectory:
        return await play_episode(session, task, 0, make_actor(task), max_turns)

    return await play_each(tasks, play, pool, concurrency=concurrency)


async def play_each(
    tasks: Sequence[Task],
    play: PlayEpisode,
    pool: EnvironmentPool,
    slots: EpisodeSlots | None = None,
    concurrency: int = _CONCURRENCY,
    timeout_s: float | None = None,
) -> list[Trajectory]:
    """Play every task once and return the trajectories in the order of the tasks.

    Args:
        tasks: The tasks to play.
        play: Plays one of them in a session.
        pool: The environments.
        slots: Notified of every episode's start and end.
        concurrency: Episodes at one time.
        timeout_s: An episode that takes longer is cancelled, and its outcome says so.
    """
    gate = asyncio.Semaphore(concurrency)
    slots = slots or EpisodeSlots()

    async def play_one(task: Task, slot: Slot) -> Trajectory:
        try:
            async with gate:
                await slot.start(task, 0)
                return await in_time(
                    play_in_session(pool, task, lambda session: play(session, task)), task, timeout_s
                )
        finally:
            slot.leave()

    results: list[Trajectory] = []
    # In waves, so that in deterministic mode a wave's members are known before its first request.
    for start in range(0, len(tasks), concurrency):
        wave = [(task, Slot(slots)) for task in tasks[start : start + concurrency]]
        try:
            results += await _all_of([play_one(task, slot) for task, slot in wave])
        finally:
            for _, slot in wave:
                slot.leave()
    return results


async def in_time(
    playing: Coroutine[Any, Any, Trajectory], task: Task, timeout_s: float | None
) -> Trajectory:
    """Wait for an episode so long; one that takes longer is cancelled, and its outcome says so."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await playing
    except TimeoutError:
        if not limit.expired():
            raise
        return Trajectory(task, 0, outcome=TrajectoryOutcome.TIMEOUT, detail=f"no end within {timeout_s:g} s")


async def _all_of(plays: Sequence[Coroutine[Any, Any, Trajectory]]) -> list[Trajectory]:
    """Run all and return their results; the first that fails cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(each) for each in plays]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in running]


def score(trajectories: Sequence[Trajectory]) -> Score:
    """Summarise episodes; one episode counts once, however many turns it has.

    Raises:
        NoResultError: If no episode ended with a result.
    """
    results = [trajectory for trajectory in trajectories if trajectory.outcome.is_result]
    if not results:
        kinds = Counter(trajectory.outcome.value for trajectory in trajectories)
        seen = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        detail = next((trajectory.detail for trajectory in trajectories if trajectory.detail), "")
        raise NoResultError(
            f"no episode ended with a result: {seen}" + (f" ({detail[:300]})" if detail else "")
        )
    return Score(
        success=success_rate(sum(trajectory.success for trajectory in results), len(results)),
        reward=mean_interval([trajectory.total_reward for trajectory in results]),
        turns=sum(len(trajectory.steps) for trajectory in results) / len(results),
        episodes=len(results),
        failures=len(trajectories) - len(results),
    )


def evaluation_set_turns(settings: EvaluationSetSettings, default: int) -> int:
    """How many turns an episode of the evaluation set may have."""
    return settings.max_turns if settings.max_turns is not None else default


async def random_baseline(
    evaluation_set: EvaluationSet, pool: EnvironmentPool, max_turns: int, seed: int
) -> Score:
    """Score a player that draws uniformly from the available actions."""
    client = await pool.client(evaluation_set.tasks[0].url)
    info = await client.env(evaluation_set.tasks[0].env_id)
    space = parse_space(info.action_space)
    space.seed(seed % 2**31)

    def actor(task: Task) -> Actor:
        return RandomActor(generator(seed, "baseline", evaluation_set.name, task.index), space.sample)

    return score(await play_tasks(evaluation_set.tasks, actor, pool, max_turns))


async def blind_baseline(
    evaluation_set: EvaluationSet,
    train_tasks: Sequence[Task],
    pool: EnvironmentPool,
    max_turns: int,
    template: str,
) -> Score:
    """Score the best player that never looks: one fixed sequence of replies for every task.

    The candidates are the expert's most frequent sequences on training tasks, and the best of them on those training
    tasks plays the evaluation set.

    Raises:
        NoBlindBaselineError: If no sequence is available: no training tasks, or no expert to learn it from.
    """
    env_id = evaluation_set.tasks[0].env_id
    if not train_tasks:
        raise NoBlindBaselineError(f"the run does not train on {env_id}")
    tasks = list(train_tasks)[:_BLIND_TASKS]
    client = await pool.client(tasks[0].url)
    if not (await client.env(env_id)).metadata.get("expert"):
        raise NoBlindBaselineError(f"{env_id} has no expert")
    try:
        shown = await play_tasks(with_expert(tasks), lambda _: ExpertActor(template), pool, max_turns)
    except ProblemError as problem:
        if problem.code != "forbidden":
            raise
        raise NoBlindBaselineError(
            "the server gives no expert actions (roll-serve --allow-expert lets it)"
        ) from problem
    sequences = Counter(
        tuple(turn.reply for turn in trajectory.turns) for trajectory in shown if trajectory.success
    )
    best: tuple[float, tuple[str, ...]] | None = None
    for sequence, _ in sequences.most_common(_BLIND_CANDIDATES):
        played = await play_tasks(tasks, partial(_scripted, sequence), pool, max_turns)
        rate = score(played).success.value
        if best is None or rate > best[0]:
            best = (rate, sequence)
    if best is None:
        raise NoBlindBaselineError(f"the expert of {env_id} solves none of {len(tasks)} training tasks")
    return score(await play_tasks(evaluation_set.tasks, partial(_scripted, best[1]), pool, max_turns))


def _scripted(replies: tuple[str, ...], _: Task) -> Actor:
    return ScriptedActor(replies)


def with_expert(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks with the option that asks the environment for its expert's actions."""
    return [replace(task, options={**(task.options or {}), "expert": True}) for task in tasks]


DEMONSTRATION_STREAM_OFFSET = 2**40
"""Demonstrations play tasks of the training stream far beyond those that reinforcement learning will reach."""


class DemonstratingActor(ExpertActor):
    """An expert that writes its replies as tokens behind the very prompts that the policy will see."""

    def __init__(self, template: str, prompts: PromptBuilder) -> None:
        super().__init__(template)
        self._prompts = prompts

    def begin(self, info: Mapping[str, Any]) -> None:
        """Start the prompts of a new episode."""
        self._prompts.begin(info)

    async def act(self, trajectory: Trajectory, view: View) -> Turn:
        """Write the prompt and the expert's reply into the record."""
        recorder = Recorder(trajectory)
        prompt = self._prompts.prompt(trajectory, view.messages)
        reply = await self.choose(view)
        ids = self._prompts.renderer.reply_ids(reply)
        segment = recorder.place(prompt.ids, prompt.images)
        shown = GenerationResult(ids, [0.0] * len(ids), [0] * len(ids))
        start, end = recorder.record(segment, shown, view.turn)
        self._prompts.replied(view.messages, reply, segment)
        return Turn(segment=segment, start=start, end=end, observation=view.text, reply=reply)


async def collect_demonstrations(
    source: TaskSource,
    count: int,
    make_prompts: Callable[[], PromptBuilder],
    template: str,
    pool: EnvironmentPool,
    max_turns: int,
) -> list[Trajectory]:
    """Return `count` episodes that the environments' experts solved.

    Raises:
        RunError: If the experts solve fewer than half of the tasks that were tried.
        NoResultError: If the environments fail all of them.
    """
    solved: list[Trajectory] = []
    tried = 0
    while len(solved) < count:
        if tried >= 2 * count + 64:
            raise RunError(f"the expert solved only {len(solved)} of {tried} tasks; demonstrations need more")
        wanted = count - len(solved)
        tasks: Sequence[Task] = [
            source.task(DEMONSTRATION_STREAM_OFFSET + tried + offset) for offset in range(wanted)
        ]
        tried += wanted
        played = await play_tasks(
            with_expert(tasks), lambda _: DemonstratingActor(template, make_prompts()), pool, max_turns
        )
        if not any(trajectory.outcome.is_result for trajectory in played):
            score(played)  # raises, and lists the outcomes
        solved += [trajectory for trajectory in played if trajectory.success]
    return solved
