"""A run that trains by playing: its parts, opened by its settings, and the training between two measurements."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from rollgym.trainer.algorithms.selection import refills
from rollgym.trainer.cluster.placement import picture, place_roles
from rollgym.trainer.config.cluster import ClusterSettings
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.config.supervised import WarmStartSettings
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.core.plugins import Plugin, load_plugin
from rollgym.trainer.core.run_files import read_lines, write_errors
from rollgym.trainer.core.shutdown import run_shielded
from rollgym.trainer.evaluation.evaluation_sets import overlap_warnings
from rollgym.trainer.evaluation.evaluator import Evaluator, as_metrics, build_evaluation_sets
from rollgym.trainer.evaluation.play import Score, collect_demonstrations
from rollgym.trainer.evaluation.reporting.charts import plot_run
from rollgym.trainer.evaluation.reporting.episodes import keep_tokenizer
from rollgym.trainer.learn.batches import row_builder
from rollgym.trainer.learn.health import RunHealth
from rollgym.trainer.learn.learner import Models
from rollgym.trainer.learn.pipelines import rl
from rollgym.trainer.learn.pipelines.saving import Saver
from rollgym.trainer.learn.pipelines.sft import supervised_rows, train_supervised
from rollgym.trainer.learn.tracking import METRICS_FILE, Tracker
from rollgym.trainer.learn.utilisation import training_work
from rollgym.trainer.records.checkpoint import Checkpoint, CheckpointStore, RunState
from rollgym.trainer.records.group import GroupPlan
from rollgym.trainer.records.ledger import LEDGER_FILE, Ledger
from rollgym.trainer.records.rollout_log import ROLLOUT_LOG_FOLDER, RolloutLog
from rollgym.trainer.rollout.admission import AdmissionWindow
from rollgym.trainer.rollout.data_check import check_streams, keep_digests
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.rollout.episodes import EpisodePlayer, group_reward
from rollgym.trainer.rollout.log_replay import LogReplay
from rollgym.trainer.rollout.prompts import prompt_maker
from rollgym.trainer.rollout.scheduler import RolloutScheduler
from rollgym.trainer.run.device_choices import keep_choices, say_choices
from rollgym.trainer.run.environments import open_environments, task_source
from rollgym.trainer.run.learners import learning_of, make_learner
from rollgym.trainer.run.models import ModelSource, TimeSharedModels, device_turns, open_models
from rollgym.trainer.run.players import Players, PolicyPlayer, model_actor, open_player, open_players
from rollgym.trainer.run.policy import Policy, build_policy
from rollgym.trainer.run.resume import (
    clear_rollout_log,
    find_checkpoint,
    go_back,
    keep_settings,
    open_tracker,
    restore_models,
)
from rollgym.trainer.run.supervision import RunAttempt
from rollgym.trainer.run.trained_policy import save_policy
from rollgym.trainer.tasks.curriculum import CurriculumTaskSource
from rollgym.trainer.tasks.dataset import row_streams
from rollgym.trainer.tasks.task import TaskSource


def make_scheduler(
    settings: RunSettings,
    playing: PolicyPlayer,
    pool: EnvironmentPool,
    source: TaskSource,
    ledger: Ledger,
    state: RunState,
    console: RunConsole,
    log_replay: LogReplay | None,
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
        log_replay=log_replay,
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
        times_aside=log_replay.rounds(rollout_settings.max_attempts) if log_replay is not None else None,
    )


def open_rollout_log(
    settings: RunSettings, directory: Path, state: RunState, console: RunConsole
) -> LogReplay | None:
    """Open the rollout log, and report what the run resumes from it."""
    if settings.rollout.log == "none":
        return None
    durable = settings.rollout.log == "machine"
    log = RolloutLog(directory / ROLLOUT_LOG_FOLDER, durable=durable, say=console.say)
    log.settle(state.next_task, state.untrained)()  # nothing is written yet: what is settled is not read
    log_replay = LogReplay(log)
    episodes, replies, tokens = log_replay.found
    if episodes:
        console.say(
            f"rollout log: {replies} replies ({tokens} tokens) of {episodes} episodes are not sampled again"
        )
    return log_replay


def _plugin(path: str | None, setting: str) -> Plugin | None:
    return None if path is None else load_plugin(path, setting)


@dataclass(frozen=True, slots=True)
class Run:
    """A run that trains by playing: its parts, open and in the state from which it goes on.

    Attributes:
        attempt: The attempt that it is.
        settings: The run's, with the judged tasks routed to the judges.
        state: What was trained before.
        policy: The policy's model, tokenizer and renderer.
        models: What is trained and read.
        turns: The models' turns on devices that they share with engines.
        source: The tasks.
        pool: The environments.
        players: What plays with the policy.
        playing: The player of its episodes.
        log_replay: The rollout log, if there is one.
        tracker: Reports metrics.
        ledger: The account of tasks.
        evaluator: Measures the policy.
        stack: Closes what is opened for training, before the parts.
    """

    attempt: RunAttempt
    settings: RunSettings
    state: RunState
    policy: Policy
    models: Models
    turns: TimeSharedModels
    source: TaskSource
    pool: EnvironmentPool
    players: Players
    playing: PolicyPlayer
    log_replay: LogReplay | None
    tracker: Tracker
    ledger: Ledger
    evaluator: Evaluator
    stack: AsyncExitStack

    async def train(self) -> None:
        """Train to the last step, measure the policy before and after, and write it down."""
        settings, console = self.settings, self.attempt.console
        before = await self._measured_before()
        parts = await self._parts()
        console.begin_training(self.state.step)
        await rl.train(
            parts,
            self.state,
            settings.steps,
            settings.checkpoint.every,
            self._evaluate,
            self.attempt.shutdown,
        )
        await parts.scheduler.close()
        for index in parts.scheduler.window.untrained:
            self.ledger.dropped(index, "the run ended")
        await self._measure_end(before)
        await self._save()

    async def _measured_before(self) -> dict[str, Score] | None:
        """Measure what was not measured by a process that was killed before it could; return what a start gave."""
        if self.tracker.evaluated(self.state.step):
            return None
        if self.state.step:
            await self._evaluate(self.state.step)
            return None
        baselines = await self.evaluator.baselines()
        self.evaluator.say("baseline", baselines)
        before = await self.evaluator.measure(whole=True)
        self.evaluator.say("start", before)
        self.tracker.metrics(0, as_metrics(before) | as_metrics(baselines))
        return before

    async def _evaluate(self, step: int) -> None:
        evaluation = self.settings.evaluation
        if evaluation.every and step % evaluation.every == 0 and step < self.settings.steps:
            scores = await self.evaluator.measure(whole=evaluation.interim_episodes is None)
            self.tracker.metrics(step, as_metrics(scores))
            self.evaluator.say(f"step {step}", scores)
        if step == self.state.step + 1 and (odd := self.tracker.unmeasured()) is not None:
            self.attempt.console.say(odd)

    async def _measure_end(self, before: dict[str, Score] | None) -> None:
        after = await self.evaluator.measure(whole=True)
        self.tracker.metrics(self.settings.steps, as_metrics(after))
        self.evaluator.say("end", after)
        if before is not None:
            self.evaluator.say_gain(before, after)

    async def _save(self) -> None:
        """Write the trained policy, and the picture of its curves."""
        console, directory = self.attempt.console, Path(self.settings.output_dir)
        with write_errors(directory):
            async with self.turns.resident():
                newest = self.attempt.store.latest()
                console.say(
                    await asyncio.to_thread(save_policy, self.models.policy, self.policy, directory, newest)
                )
            console.say(f"curves: {plot_run(directory, self.settings.name)}")

    async def _parts(self) -> rl.Parts:
        """Open what the training loop needs besides: the curriculum, the scheduler, the learner."""
        settings, console, stack = self.settings, self.attempt.console, self.stack
        directory, state = Path(settings.output_dir), self.state
        curriculum = self.source if isinstance(self.source, CurriculumTaskSource) else None
        if curriculum is not None:
            curriculum.take_up(directory, state.step)
            stack.callback(curriculum.close)
        scheduler = make_scheduler(
            settings, self.playing, self.pool, self.source, self.ledger, state, console, self.log_replay
        )
        stack.push_async_callback(scheduler.close)
        health = RunHealth(learning_of(settings), settings.rollout.max_steps_without_learning, console.say)
        health.take_up(read_lines(directory / METRICS_FILE, "step"))
        return rl.Parts(
            algorithm=settings.algorithm,
            scheduler=scheduler,
            learner=await make_learner(settings, self.models, self.policy, stack, console.say),
            models=self.models,
            publisher=self.players.publisher,
            client=self.players.client,
            build_rows=row_builder(settings.rows),
            ledger=self.ledger,
            tracker=self.tracker,
            console=console,
            health=health,
            saver=Saver(
                self.models,
                self.attempt.store,
                self.tracker,
                self.ledger,
                self.log_replay,
                asynchronous=settings.checkpoint.asynchronous,
                resident=self.turns.resident,
            ),
            resident=self.turns.resident,
            begins_early=not settings.cluster.offload,
            updating=self.players.updating,
            log_replay=self.log_replay,
            curriculum=curriculum,
            work=training_work(settings, self.policy.model.config.to_dict()),
            backpressure=self.pool.backpressure,
        )


@asynccontextmanager
async def open_run(attempt: RunAttempt) -> AsyncIterator[Run]:
    """Open a run that trains by playing, from the start or from the newest checkpoint.

    What is cheap and may be refused comes first: files, roles, data, environments; then models, and what plays.
    """
    console, roles, store = attempt.console, attempt.roles, attempt.store
    async with AsyncExitStack() as stack:
        checkpoint = await _settled(attempt)
        settings, cluster, directory = roles.settings, roles.cluster, Path(attempt.settings.output_dir)
        source = task_source(settings)
        streams = row_streams(source)
        ours = _is_ours(store, checkpoint)
        keep_digests(streams, directory, resuming=ours)
        if ours:  # if resuming is refused, nothing is lost
            clear_rollout_log(settings, directory, resuming=True)
        torch.set_num_threads(settings.threads)
        go_back(store, checkpoint, directory, console.say)
        trains_here = settings.backend.in_process
        # Where ranks train and servers sample, the one that is here is there to be asked for names and shapes.
        computes = trains_here or settings.inference.embedded or settings.warm_start is not None
        policy = build_policy(settings, trained=trains_here, computes=computes)
        policy.renderer.template.say = console.say
        keep_tokenizer(policy.tokenizer, directory)
        pool = await stack.enter_async_context(open_environments(settings, console, roles.serve))
        await check_streams(streams, pool)
        evaluation_sets = await build_evaluation_sets(settings, pool)
        for warning in overlap_warnings(streams, evaluation_sets):
            console.say(warning)
        opening = open_models(settings, policy, directory, console, cluster, roles.groups)
        made = await stack.enter_async_context(opening)
        models, state = await begin(settings, store, checkpoint, policy, pool, source, console, made)
        _say_how(settings, models, console)
        log_replay = open_rollout_log(settings, directory, state, console)
        if log_replay is not None:
            stack.callback(log_replay.log.close)
        # An engine with weights of its own may sample while training changes the policy's.
        meanwhile = settings.rollout.max_staleness > 0 or not trains_here
        players = await stack.enter_async_context(
            open_players(
                settings, policy, pool, console, log_replay, trains_meanwhile=meanwhile, cluster=cluster
            )
        )
        await players.publisher.publish(models.policy, state.version)
        turns = device_turns(settings, models, made.shared)
        await turns.leave()
        tracker, ledger = _open_records(settings, state, console, stack)
        playing = await stack.enter_async_context(open_player(settings, policy, players, console))
        yield Run(
            attempt,
            settings,
            state,
            policy,
            models,
            turns,
            source,
            pool,
            players,
            playing,
            log_replay,
            tracker,
            ledger,
            Evaluator(settings, playing, pool, console, evaluation_sets, source),
            stack,
        )


async def _settled(attempt: RunAttempt) -> Checkpoint | None:
    """Return the checkpoint to go on from, once the directory is the run's and its roles are there."""
    settings, console, directory = attempt.settings, attempt.console, Path(attempt.settings.output_dir)
    checkpoint = find_checkpoint(settings, attempt.store, console.say)
    ours = _is_ours(attempt.store, checkpoint)
    if not ours:  # what an earlier run left must never be taken for this one's
        clear_rollout_log(settings, directory, resuming=False)
    keep_settings(settings, directory, resuming=ours)
    placement = place_roles(settings)
    if settings.cluster != ClusterSettings():
        console.say(picture(placement))
    await attempt.roles.open()
    return checkpoint


def _is_ours(store: CheckpointStore, checkpoint: Checkpoint | None) -> bool:
    """Whether a checkpoint is the run's own, and not one of another run that this one begins with."""
    return checkpoint is not None and store.holds(checkpoint.folder)


def _say_how(settings: RunSettings, models: Models, console: RunConsole) -> None:
    """Keep and report how models compute on this device."""
    if (reason := models.policy.why_not_shared) is not None:
        console.say(
            f"shared prefixes: {reason}; tokens of rows that begin alike go through the model once only where a row is "
            "the beginning of another one"
        )
    keep_choices(settings, models.policy.kernels, Path(settings.output_dir))
    for line in say_choices(settings, models.policy.kernels):
        console.say(line)


def _open_records(
    settings: RunSettings, state: RunState, console: RunConsole, stack: AsyncExitStack
) -> tuple[Tracker, Ledger]:
    """Open what a run reports to, and the account of its tasks, as they were when its state was saved."""
    tracker = open_tracker(settings, state.step, console.say)
    stack.push_async_callback(asyncio.to_thread, tracker.close)
    ledger = Ledger(Path(settings.output_dir) / LEDGER_FILE)
    stack.callback(ledger.close)
    ledger.roll_back(state.next_task, state.step, state.untrained)
    return tracker, ledger


async def begin(
    settings: RunSettings,
    store: CheckpointStore,
    checkpoint: Checkpoint | None,
    policy: Policy,
    pool: EnvironmentPool,
    source: TaskSource,
    console: RunConsole,
    made: ModelSource,
) -> tuple[Models, RunState]:
    """Return the models in their resumed or initial state; a configured warm start is computed and saved."""
    if checkpoint is not None:
        models = await asyncio.to_thread(made.models)
        await restore_models(store, checkpoint, models)
        return models, checkpoint.state
    if settings.warm_start is not None:
        await _warm_start(settings, settings.warm_start, policy, pool, source, console, made)
    models, state = await asyncio.to_thread(made.models), RunState(0, 0, 0, ())
    if settings.warm_start is not None:
        await run_shielded(asyncio.to_thread(lambda: store.save(state, models.state_dicts())))
    return models, state


async def _warm_start(
    settings: RunSettings,
    warm: WarmStartSettings,
    policy: Policy,
    pool: EnvironmentPool,
    source: TaskSource,
    console: RunConsole,
    made: ModelSource,
) -> None:
    make_prompts = prompt_maker(policy.renderer, settings.prompt)
    console.begin("expert demonstrations", warm.demonstrations)
    shown = await collect_demonstrations(
        source,
        warm.demonstrations,
        make_prompts,
        warm.reply,
        pool,
        settings.rollout.max_turns,
    )
    rows = supervised_rows(shown, settings.model.max_length, console.say)
    console.say(
        f"warm start on {len(shown)} expert demonstrations ({len(rows)} rows); none are used after it"
    )
    backend = await asyncio.to_thread(made.warm_start, warm.learning_rate)
    work = train_supervised(
        backend,
        rows,
        epochs=warm.epochs,
        batch_rows=warm.batch_rows,
        seed=settings.seed,
        max_skipped_steps=settings.optimizer.max_skipped_steps,
        say=console.say,
    )
    # In a thread, batch by batch: the console stays live, and an interruption waits for at most one batch.
    while (progress := await asyncio.to_thread(next, work, None)) is not None:
        if progress.batches == 1:
            console.begin("warm start", progress.total)
        console.advance(progress.batches)
        if progress.epoch is not None:
            console.say(f"warm start, epoch {progress.epoch + 1}/{warm.epochs}: loss {progress.loss:.4f}")
    await asyncio.to_thread(made.end_warm_start, backend)
