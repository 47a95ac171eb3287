"""Sources of a run's groups: the scheduler of episodes, and the rollout log that outlives the process."""

from pathlib import Path

from rollgym.trainer.algorithms.filters import refills
from rollgym.trainer.assembly.agents import PolicyPlayer
from rollgym.trainer.assembly.players import model_actor
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.core.plugins import Plugin, load_plugin
from rollgym.trainer.learn.pipelines import rl
from rollgym.trainer.records.checkpoint import RunState
from rollgym.trainer.records.group import GroupPlan
from rollgym.trainer.records.ledger import Ledger
from rollgym.trainer.records.rollout_log import ROLLOUT_LOG_FOLDER, RolloutLog
from rollgym.trainer.rollout.admission import AdmissionWindow
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.rollout.episodes import EpisodePlayer, group_reward
from rollgym.trainer.rollout.recall import Recall
from rollgym.trainer.rollout.scheduler import RolloutScheduler
from rollgym.trainer.tasks.task import TaskSource


def make_scheduler(
    settings: RunSettings,
    playing: PolicyPlayer,
    pool: EnvironmentPool,
    source: TaskSource,
    ledger: Ledger,
    state: RunState,
    console: RunConsole,
    recall: Recall | None,
) -> RolloutScheduler:
    """Return the scheduler that plays groups ahead of training, from the run's present state."""
    rollout_settings, policy, players = settings.rollout, playing.policy, playing.players
    window = AdmissionWindow(
        rollout_settings.groups_per_step,
        rollout_settings.max_staleness,
        rollout_settings.window_fraction,
        start=state.next_task,
        reissue=state.untrained,
        aside=state.aside,
        long_round=state.long_round,
        extra=rollout_settings.extra_groups,
    )
    chosen = settings.algorithm.filter
    plan = GroupPlan(
        rollout_settings.group_size,
        rollout_settings.extra_members,
        rollout_settings.max_attempts,
        rollout_settings.episode_timeout_s,
        rollout_settings.max_failed_groups,
        replace_at_once=not settings.deterministic,
        max_left_out=chosen.max_rounds * rollout_settings.groups_per_step if refills(chosen) else None,
        greedy=settings.algorithm.needs_greedy,
    )

    def lost(task: int, why: str) -> None:
        ledger.begun_again(task, why)
        console.explain(f"an episode of task {task} begins again: {why}")

    def differs(task: int, how: str) -> None:
        console.explain(f"an episode of task {task} asked otherwise than before the run was resumed: {how}")

    player = EpisodePlayer(
        pool,
        lambda: model_actor(settings, policy, players, "train"),
        rollout_settings.max_turns,
        agent=playing.coroutine,
        reward=_plugin(rollout_settings.reward, "rollout.reward"),
        recall=recall,
        lost=lost,
        black_box=playing.black_box,
        differs=differs,
        make_greedy=lambda: model_actor(settings, policy, players, "train", greedy=True),
        greedy_member=plan.sampled if plan.greedy else None,
        vocabulary=policy.vocabulary,
    )

    judge = _plugin(rollout_settings.group_reward, "rollout.group_reward")

    async def disconnected() -> bool:
        return pool.disconnected or not (await players.client.health()).ready

    return RolloutScheduler(
        source,
        window,
        player.play,
        plan,
        ledger,
        players.slots,
        report=console.explain,
        disconnected=disconnected,
        leave_out=rl.leave_out(settings.algorithm) if refills(chosen) else None,
        judge=None if judge is None else group_reward(judge),
        times_aside=recall.rounds(rollout_settings.max_attempts) if recall is not None else None,
    )


def open_recall(
    settings: RunSettings, directory: Path, state: RunState, console: RunConsole
) -> Recall | None:
    """Open the rollout log, and report what the run resumes from it."""
    if settings.rollout.log == "none":
        return None
    durable = settings.rollout.log == "machine"
    log = RolloutLog(directory / ROLLOUT_LOG_FOLDER, durable=durable, say=console.say)
    log.settle(state.next_task, state.untrained)()  # nothing is written yet: what is settled is not read
    recall = Recall(log)
    episodes, replies, tokens = recall.found
    if episodes:
        console.say(
            f"rollout log: {replies} replies ({tokens} tokens) of {episodes} episodes are not sampled again"
        )
    return recall


def _plugin(path: str | None, setting: str) -> Plugin | None:
    return None if path is None else load_plugin(path, setting)
