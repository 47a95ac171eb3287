"""`roll-train`: the parts of a run, put together and set going."""

import asyncio
import copy
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import torch

from trainer.assembly.build import (
    Players,
    Policy,
    build_policy,
    critic_backend,
    model_actor,
    open_environments,
    open_players,
    policy_backend,
    task_source,
    warm_start_backend,
)
from trainer.assembly.data_check import check_streams, keep_digests
from trainer.backends.torch_backend import TorchBackend
from trainer.commands.plots import plot_run
from trainer.commands.resume import clear_records, find_checkpoint, has_trained, keep_settings
from trainer.config.checks import check_settings
from trainer.config.load import public_settings
from trainer.config.run import RunSettings, WarmStartSettings
from trainer.core.console import RunConsole
from trainer.core.embedded_server import embedded_server
from trainer.core.ending import Ending
from trainer.core.errors import RunError, TrainerError
from trainer.core.plugins import Plugin, load_plugin
from trainer.core.run_files import WriteError, write_errors
from trainer.core.run_lock import run_lock
from trainer.evaluation.demonstrations import collect_demonstrations
from trainer.evaluation.evaluator import Evaluator, as_metrics, build_panels
from trainer.evaluation.play import Score
from trainer.learn.boards import RunIdentity, open_boards
from trainer.learn.learner import Learner, Models
from trainer.learn.rows import row_builder
from trainer.learn.tracking import Tracker
from trainer.models.load import save_model
from trainer.pipelines import rl
from trainer.pipelines.sft import supervised_rows, train_supervised
from trainer.records.checkpoint import Checkpoint, CheckpointError, CheckpointStore, RunState
from trainer.records.ledger import LEDGER_FILE, Ledger
from trainer.reporting.tokens import TOKENIZER_FOLDER
from trainer.rollout.admission import AdmissionWindow
from trainer.rollout.context import context_policy
from trainer.rollout.environments import EnvironmentPool
from trainer.rollout.episodes import EpisodePlayer
from trainer.rollout.prompts import PromptBuilder
from trainer.rollout.scheduler import GroupPlan, RolloutScheduler
from trainer.tasks.dataset import row_streams
from trainer.tasks.task import TaskSource
from trainer.weights.publisher import WeightPublisher


class RunStoppedError(TrainerError):
    """A run ended before its last step; the message says why, what is saved, and how to go on."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


async def train(settings: RunSettings, ending: Ending) -> int:
    """Train a policy, from the start or from the newest checkpoint.

    Args:
        settings: The run.
        ending: Ends the run before its time, in order.

    Raises:
        RunStoppedError: If it was interrupted, lost its environments or its disk, or cannot go on, once what was learnt
            is saved.
    """
    check_settings(settings)
    directory = Path(settings.output_dir)
    store = CheckpointStore(directory / "checkpoints", settings.checkpoint.keep)
    with run_lock(directory):
        try:
            async with AsyncExitStack() as stack:
                console = RunConsole(settings.steps, live=settings.tracking.console)
                stack.callback(console.close)
                ending.say = console.say
                await _train(settings, store, console, ending, stack)
        except asyncio.CancelledError:
            if ending.reason is None:
                raise
            raise _stopped(ending.reason, store, directory) from None
        except (ConnectionError, TimeoutError, WriteError, RunError) as error:
            raise _stopped(error, store, directory) from error
    return 0


def _stopped(error: Exception, store: CheckpointStore, directory: Path) -> RunStoppedError:
    newest = store.latest()
    if newest is not None:
        how = f"go on from {newest} by the same command with checkpoint.resume=auto"
    elif has_trained(directory):
        how = "no checkpoint was saved, and the same command with checkpoint.resume=auto begins again"
    else:
        how = "nothing was learnt yet, and the same command begins again"
    return RunStoppedError(f"{error}; {how}", getattr(error, "exit_code", 2))


async def _train(
    settings: RunSettings, store: CheckpointStore, console: RunConsole, ending: Ending, stack: AsyncExitStack
) -> None:
    directory = Path(settings.output_dir)
    checkpoint = find_checkpoint(settings, store, console.say)
    ours = checkpoint is not None and store.holds(checkpoint.folder)
    keep_settings(settings, directory, resuming=ours)
    source = task_source(settings)
    streams = row_streams(source)
    keep_digests(streams, directory, resuming=ours)
    torch.set_num_threads(settings.threads)
    if checkpoint is not None:
        console.say(f"resuming at step {checkpoint.state.step} from {checkpoint.folder}")
    if checkpoint is not None and ours:
        store.go_back_to(checkpoint.folder, checkpoint.state.step)
    elif clear_records(directory):
        console.say(f"the run in {directory} left no checkpoint: it begins again, and its records with it")
    policy = build_policy(settings)
    policy.renderer.template.say = console.say
    with write_errors(directory):
        policy.tokenizer.save_pretrained(
            directory / TOKENIZER_FOLDER
        )  # for who looks at the episodes' tokens
    serve = partial(embedded_server, on_end=ending.end)
    pool = await stack.enter_async_context(open_environments(settings, console, serve))
    await check_streams(streams, pool)
    panels = await build_panels(settings, pool)
    models, state = await _start(settings, store, checkpoint, policy, pool, source, console)
    players = await stack.enter_async_context(open_players(settings, policy, pool, console))
    publisher = WeightPublisher([players.client])
    await publisher.publish(models.policy, state.version)
    run = RunIdentity(directory, settings.name, public_settings(settings))
    boards = open_boards(settings.tracking, run, console.say)
    tracker = Tracker(directory, settings.tracking, state.step, boards)
    stack.push_async_callback(asyncio.to_thread, tracker.close)
    ledger = Ledger(directory / LEDGER_FILE)
    stack.callback(ledger.close)
    ledger.roll_back(state.next_task, state.step, state.untrained)
    evaluator = Evaluator(settings, policy, players, pool, console, panels, source)

    async def evaluate(step: int) -> None:
        every = settings.evaluation.every
        if every and step % every == 0 and step < settings.steps:
            scores = await evaluator.measure(whole=settings.evaluation.interim_episodes is None)
            tracker.metrics(step, as_metrics(scores))
            evaluator.say(f"step {step}", scores)

    before = None
    if not tracker.evaluated(state.step):  # by a process that was killed before it could
        if state.step == 0:
            before = await _measure_start(evaluator, tracker)
        else:
            await evaluate(state.step)
    scheduler = _scheduler(settings, policy, players, pool, source, ledger, state, console)
    stack.push_async_callback(scheduler.close)
    parts = rl.Parts(
        algorithm=settings.algorithm,
        scheduler=scheduler,
        learner=Learner(
            settings.algorithm,
            models,
            settings.seed,
            max_skipped_steps=settings.optimizer.max_skipped_steps,
            truncated=settings.rollout.truncates,
        ),
        models=models,
        publisher=publisher,
        client=players.client,
        build_rows=row_builder(settings.rows),
        ledger=ledger,
        tracker=tracker,
        console=console,
        checkpoints=store,
    )
    console.begin_training(state.step)
    await rl.train(parts, state, settings.steps, settings.checkpoint.every, evaluate, ending)
    await scheduler.close()
    for index in scheduler.window.untrained:
        ledger.dropped(index, "the run ended")
    after = await evaluator.measure(whole=True)
    tracker.metrics(settings.steps, as_metrics(after))
    evaluator.say("end", after)
    if before is not None:
        evaluator.say_gain(before, after)
    with write_errors(directory):
        save_model(policy.model, policy.tokenizer, directory / "model")
        console.say(f"model: {directory / 'model'}")
        console.say(f"curves: {plot_run(directory, settings.name)}")


async def _start(
    settings: RunSettings,
    store: CheckpointStore,
    checkpoint: Checkpoint | None,
    policy: Policy,
    pool: EnvironmentPool,
    source: TaskSource,
    console: RunConsole,
) -> tuple[Models, RunState]:
    """Return the models as they go on or begin; a warm start is made where one is wanted, and saved."""
    if checkpoint is not None:
        models = _models(settings, policy)
        try:
            models.load_state_dicts(checkpoint.parts)
        except ValueError as error:
            raise CheckpointError(f"cannot resume from {checkpoint.folder}: {error}") from error
        return models, checkpoint.state
    if settings.warm_start is not None:
        await _warm_start(settings, settings.warm_start, policy, pool, source, console)
    models, state = _models(settings, policy), RunState(0, 0, 0, ())
    if settings.warm_start is not None:
        store.save(state, models.state_dicts())
    return models, state


async def _warm_start(
    settings: RunSettings,
    warm: WarmStartSettings,
    policy: Policy,
    pool: EnvironmentPool,
    source: TaskSource,
    console: RunConsole,
) -> None:
    context = context_policy(settings.prompt)
    console.begin("expert demonstrations", warm.demonstrations)
    shown = await collect_demonstrations(
        source,
        warm.demonstrations,
        lambda: PromptBuilder(policy.renderer, context, settings.prompt),
        warm.reply,
        pool,
        settings.rollout.max_turns,
    )
    rows = supervised_rows(shown)
    console.say(
        f"warm start on {len(shown)} expert demonstrations ({len(rows)} rows); none are used after it"
    )
    work = train_supervised(
        warm_start_backend(settings, policy.model, warm.learning_rate),
        rows,
        epochs=warm.epochs,
        batch_rows=warm.batch_rows,
        seed=settings.seed,
        max_skipped_steps=settings.optimizer.max_skipped_steps,
    )
    # In a thread, batch by batch: the console goes on, and an interruption waits for one batch at most.
    while (progress := await asyncio.to_thread(next, work, None)) is not None:
        if progress.batches == 1:
            console.begin("warm start", progress.total)
        console.advance(progress.batches)
        if progress.epoch is not None:
            console.say(f"warm start, epoch {progress.epoch + 1}/{warm.epochs}: loss {progress.loss:.4f}")


def _models(settings: RunSettings, policy: Policy) -> Models:
    return Models(
        policy=policy_backend(settings, policy.model),
        critic=critic_backend(settings, policy.model) if settings.algorithm.critic is not None else None,
        reference=_reference(settings, policy) if settings.algorithm.needs_reference else None,
    )


def _reference(settings: RunSettings, policy: Policy) -> TorchBackend:
    return policy_backend(settings, copy.deepcopy(policy.model))


def _scheduler(
    settings: RunSettings,
    policy: Policy,
    players: Players,
    pool: EnvironmentPool,
    source: TaskSource,
    ledger: Ledger,
    state: RunState,
    console: RunConsole,
) -> RolloutScheduler:
    rollout_settings = settings.rollout
    window = AdmissionWindow(
        rollout_settings.groups_per_step,
        rollout_settings.max_staleness,
        rollout_settings.window_fraction,
        start=state.next_task,
        reissue=state.untrained,
    )
    plan = GroupPlan(
        rollout_settings.group_size,
        rollout_settings.extra_members,
        rollout_settings.max_attempts,
        rollout_settings.episode_timeout_s,
        rollout_settings.max_failed_groups,
        replace_at_once=not settings.deterministic,
    )
    player = EpisodePlayer(
        pool,
        lambda: model_actor(settings, policy, players, "train"),
        rollout_settings.max_turns,
        agent=_plugin(rollout_settings.agent, "rollout.agent"),
        reward=_plugin(rollout_settings.reward, "rollout.reward"),
    )
    return RolloutScheduler(
        source,
        window,
        player.play,
        plan,
        ledger,
        players.slots,
        report=console.explain,
        disconnected=lambda: pool.disconnected,
    )


def _plugin(path: str | None, setting: str) -> Plugin | None:
    return None if path is None else load_plugin(path, setting)


async def _measure_start(evaluator: Evaluator, tracker: Tracker) -> dict[str, Score]:
    """Measure where the run begins, once."""
    baselines = await evaluator.baselines()
    evaluator.say("baseline", baselines)
    before = await evaluator.measure(whole=True)
    evaluator.say("start", before)
    tracker.metrics(0, as_metrics(before) | as_metrics(baselines))
    return before
