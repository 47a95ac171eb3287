"""`roll-train`: builds the parts of a run, and starts it."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import torch

from rollgym.trainer.assembly.agents import open_player
from rollgym.trainer.assembly.data_check import check_streams, keep_digests
from rollgym.trainer.assembly.device_choices import keep_choices, say_choices
from rollgym.trainer.assembly.environments import open_environments, task_source
from rollgym.trainer.assembly.inference import check_inference
from rollgym.trainer.assembly.models import ModelSource, check_backend, open_models
from rollgym.trainer.assembly.players import open_players
from rollgym.trainer.assembly.policy import Policy, build_policy
from rollgym.trainer.assembly.standing import StandingRoles
from rollgym.trainer.assembly.turns import device_turns
from rollgym.trainer.cluster.placement import picture, place_roles
from rollgym.trainer.commands.learners import learning_of, make_learner
from rollgym.trainer.commands.plots import plot_run
from rollgym.trainer.commands.policy import save_policy
from rollgym.trainer.commands.resume import (
    clear_rollout_log,
    find_checkpoint,
    go_back,
    keep_settings,
    keep_start,
)
from rollgym.trainer.commands.scheduling import make_scheduler, open_recall
from rollgym.trainer.commands.supervision import run_supervised
from rollgym.trainer.config.cluster import ClusterSettings
from rollgym.trainer.config.load import public_settings
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.config.supervised import WarmStartSettings
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.core.ending import Ending, to_its_end
from rollgym.trainer.core.errors import CheckpointError
from rollgym.trainer.core.run_files import read_lines, write_errors
from rollgym.trainer.evaluation.demonstrations import collect_demonstrations
from rollgym.trainer.evaluation.evaluator import Evaluator, as_metrics, build_evaluation_sets
from rollgym.trainer.evaluation.overlap import overlap_warnings
from rollgym.trainer.evaluation.play import Score
from rollgym.trainer.evaluation.reporting.episodes import keep_tokenizer
from rollgym.trainer.learn.boards import RunIdentity, open_boards
from rollgym.trainer.learn.health import RunHealth
from rollgym.trainer.learn.learner import Models
from rollgym.trainer.learn.pipelines import rl
from rollgym.trainer.learn.pipelines.saving import Saver
from rollgym.trainer.learn.pipelines.sft import supervised_rows, train_supervised
from rollgym.trainer.learn.rows import row_builder
from rollgym.trainer.learn.tracking import METRICS_FILE, Tracker
from rollgym.trainer.learn.utilisation import training_work
from rollgym.trainer.records.checkpoint import Checkpoint, RunState
from rollgym.trainer.records.checkpoint_store import CheckpointStore
from rollgym.trainer.records.ledger import LEDGER_FILE, Ledger
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.rollout.prompts import prompt_maker
from rollgym.trainer.tasks.curriculum import CurriculumTaskSource
from rollgym.trainer.tasks.dataset import row_streams
from rollgym.trainer.tasks.task import TaskSource


async def train(settings: RunSettings, ending: Ending, command: str = "train") -> int:
    """Train a policy, from the start or from the newest checkpoint.

    Args:
        settings: The run.
        ending: Requests an early, orderly end.
        command: "train", or "distill" if the policy learns from a teacher on its own episodes.

    Raises:
        RunStoppedError: If it ends before its last step, once what was learnt is saved.
    """
    check_inference(settings)
    check_backend(settings)
    roles = StandingRoles(settings, ending)
    return await run_supervised(settings, ending, partial(_train, roles=roles), roles)


async def _train(
    settings: RunSettings,
    store: CheckpointStore,
    console: RunConsole,
    ending: Ending,
    stack: AsyncExitStack,
    roles: StandingRoles,
) -> None:
    directory = Path(settings.output_dir)
    checkpoint = find_checkpoint(settings, store, console.say)
    ours = checkpoint is not None and store.holds(checkpoint.folder)
    if not ours:  # what an earlier run left must never be taken for this one's
        clear_rollout_log(settings, directory, resuming=False)
    keep_settings(settings, directory, resuming=ours)
    placement = place_roles(settings)
    if settings.cluster != ClusterSettings():
        console.say(picture(placement))
    await roles.open()
    settings, cluster = roles.settings, roles.cluster
    source = task_source(settings)
    streams = row_streams(source)
    keep_digests(streams, directory, resuming=ours)
    if ours:  # if resuming is refused, nothing is lost
        clear_rollout_log(settings, directory, resuming=True)
    torch.set_num_threads(settings.threads)
    go_back(store, checkpoint, directory, console.say)
    trains_here = settings.backend.kind == "torch"
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
    made = await stack.enter_async_context(
        open_models(settings, policy, directory, console, cluster, roles.groups)
    )
    models, state = await begin(settings, store, checkpoint, policy, pool, source, console, made)
    if (reason := models.policy.why_not_shared) is not None:
        console.say(
            f"shared prefixes: {reason}; tokens of rows that begin alike go through the model once only where a row is "
            "the beginning of another one"
        )
    keep_choices(settings, models.policy.kernels, directory)
    for line in say_choices(settings, models.policy.kernels):
        console.say(line)
    recall = open_recall(settings, directory, state, console)
    if recall is not None:
        stack.callback(recall.log.close)
    # An engine with weights of its own may sample while training changes the policy's.
    trains_meanwhile = settings.rollout.max_staleness > 0 or not trains_here
    players = await stack.enter_async_context(
        open_players(
            settings, policy, pool, console, recall, trains_meanwhile=trains_meanwhile, cluster=cluster
        )
    )
    await players.publisher.publish(models.policy, state.version)
    turns = device_turns(settings, models, made.shared)
    await turns.leave()
    run = RunIdentity(directory, settings.name, public_settings(settings), state.step)
    boards = open_boards(settings.tracking, run, console.say)
    best = settings.checkpoint.best_metric
    tracker = Tracker(directory, settings.tracking, state.step, boards, best, console.say)
    stack.push_async_callback(asyncio.to_thread, tracker.close)
    ledger = Ledger(directory / LEDGER_FILE)
    stack.callback(ledger.close)
    ledger.roll_back(state.next_task, state.step, state.untrained)
    playing = await stack.enter_async_context(open_player(settings, policy, players, console))
    evaluator = Evaluator(settings, playing, pool, console, evaluation_sets, source)

    async def evaluate(step: int) -> None:
        every = settings.evaluation.every
        if every and step % every == 0 and step < settings.steps:
            scores = await evaluator.measure(whole=settings.evaluation.interim_episodes is None)
            tracker.metrics(step, as_metrics(scores))
            evaluator.say(f"step {step}", scores)
        if step == state.step + 1 and (odd := tracker.unmeasured()) is not None:
            console.say(odd)

    before = None
    if not tracker.evaluated(state.step):  # by a process that was killed before it could
        if state.step == 0:
            before = await _measure_start(evaluator, tracker)
        else:
            await evaluate(state.step)
    curriculum = source if isinstance(source, CurriculumTaskSource) else None
    if curriculum is not None:
        curriculum.take_up(directory, state.step)
        stack.callback(curriculum.close)
    scheduler = make_scheduler(settings, playing, pool, source, ledger, state, console, recall)
    stack.push_async_callback(scheduler.close)
    health = RunHealth(learning_of(settings), settings.rollout.max_steps_without_learning, console.say)
    health.take_up(read_lines(directory / METRICS_FILE, "step"))
    parts = rl.Parts(
        algorithm=settings.algorithm,
        scheduler=scheduler,
        learner=await make_learner(settings, models, policy, stack, console.say),
        models=models,
        publisher=players.publisher,
        client=players.client,
        build_rows=row_builder(settings.rows),
        ledger=ledger,
        tracker=tracker,
        console=console,
        health=health,
        saver=Saver(
            models,
            store,
            tracker,
            ledger,
            recall,
            asynchronous=settings.checkpoint.asynchronous,
            resident=turns.resident,
        ),
        resident=turns.resident,
        updating=players.updating,
        recall=recall,
        curriculum=curriculum,
        work=training_work(settings, policy.model.config.to_dict()),
        backpressure=pool.backpressure,
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
        async with turns.resident():
            console.say(
                await asyncio.to_thread(save_policy, models.policy, policy, directory, store.latest())
            )
        console.say(f"curves: {plot_run(directory, settings.name)}")


async def _measure_start(evaluator: Evaluator, tracker: Tracker) -> dict[str, Score]:
    """Evaluate the policy before the first training step, once."""
    baselines = await evaluator.baselines()
    evaluator.say("baseline", baselines)
    before = await evaluator.measure(whole=True)
    evaluator.say("start", before)
    tracker.metrics(0, as_metrics(before) | as_metrics(baselines))
    return before


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
        try:
            await asyncio.to_thread(models.load_state_dicts, checkpoint.parts)
        except ValueError as error:
            raise CheckpointError(f"cannot resume from {checkpoint.folder}: {error}") from error
        await keep_start(store, checkpoint, models)
        return models, checkpoint.state
    if settings.warm_start is not None:
        await _warm_start(settings, settings.warm_start, policy, pool, source, console, made)
    models, state = await asyncio.to_thread(made.models), RunState(0, 0, 0, ())
    if settings.warm_start is not None:
        await to_its_end(asyncio.to_thread(lambda: store.save(state, models.state_dicts())))
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
