"""`roll-train`: the parts of a run, put together and set going."""

import asyncio
import difflib
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import torch

from trainer.algorithms.filters import refills
from trainer.assembly.agents import PolicyPlayer, open_player
from trainer.assembly.build import (
    Policy,
    build_policy,
    model_actor,
    open_environments,
    open_players,
    task_source,
)
from trainer.assembly.data_check import check_streams, keep_digests
from trainer.assembly.inference import check_inference
from trainer.assembly.judges import open_judges
from trainer.assembly.models import ModelSource, check_backend, open_models
from trainer.assembly.turns import device_turns
from trainer.backends.base import TrainBackend
from trainer.cluster.cluster import open_cluster
from trainer.cluster.placement import picture, place_roles
from trainer.cluster.supervision import Restarts, death_in
from trainer.commands.plots import plot_run
from trainer.commands.policy import ADAPTER_FOLDER, MODEL_FOLDER
from trainer.commands.resume import (
    clear_records,
    clear_rollout_log,
    find_checkpoint,
    has_trained,
    keep_settings,
)
from trainer.config.checks import check_settings
from trainer.config.cluster import ClusterSettings
from trainer.config.load import public_settings
from trainer.config.run import RunSettings, WarmStartSettings
from trainer.core.console import RunConsole
from trainer.core.embedded_server import embedded_server
from trainer.core.ending import Ending, to_its_end
from trainer.core.errors import RoleDiedError, RunError, TrainerError
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
from trainer.learn.utilisation import training_work
from trainer.pipelines import rl
from trainer.pipelines.saving import Saver
from trainer.pipelines.sft import supervised_rows, train_supervised
from trainer.records.checkpoint import Checkpoint, CheckpointError, CheckpointStore, RunState
from trainer.records.ledger import LEDGER_FILE, Ledger
from trainer.records.rollout_log import ROLLOUT_LOG_FOLDER, RolloutLog
from trainer.reporting.tokens import keep_tokenizer
from trainer.rollout.admission import AdmissionWindow
from trainer.rollout.context import context_policy
from trainer.rollout.environments import EnvironmentPool
from trainer.rollout.episodes import EpisodePlayer
from trainer.rollout.prompts import PromptBuilder
from trainer.rollout.recall import Recall
from trainer.rollout.scheduler import GroupPlan, RolloutScheduler
from trainer.tasks.dataset import row_streams
from trainer.tasks.task import TaskSource


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

    Where a process of one of its roles dies, the roles are started again, and the run goes on from its last checkpoint.

    Raises:
        RunStoppedError: If it was interrupted, lost its environments or its disk, lost roles too often, or cannot go
            on, once what was learnt is saved.
    """
    check_settings(settings)
    check_inference(settings)
    check_backend(settings)
    place_roles(settings)
    directory = Path(settings.output_dir)
    kept = settings.checkpoint
    store = CheckpointStore(directory / "checkpoints", kept.keep, kept.keep_best, kept.best_is)
    with run_lock(directory):
        try:
            await _supervised(settings, store, ending)
        except asyncio.CancelledError:
            if ending.reason is None:
                raise
            raise _stopped(ending.reason, store, directory) from None
        except (ConnectionError, TimeoutError, WriteError, RunError) as error:
            raise _stopped(ending.reason or error, store, directory) from error
    return 0


async def _supervised(settings: RunSettings, store: CheckpointStore, ending: Ending) -> None:
    """Train to the end, however often roles die on the way, within the bounds that the settings name."""
    restarts = Restarts(settings.cluster.restarts, settings.cluster.restart_after_s)
    while True:
        try:
            async with AsyncExitStack() as stack:
                console = RunConsole(settings.steps, live=settings.tracking.console)
                stack.callback(console.close)
                ending.say = console.say
                await _train(settings, store, console, ending, stack)
            return
        except (Exception, asyncio.CancelledError) as error:
            died = death_in(ending.reason or error)
            wait_s = None if died is None else restarts.wait_s(store.highest_step())
            if died is None or wait_s is None or not await ending.take_back():
                raise
            say = RunConsole(settings.steps, live=False).explain
            say(f"{died}")
            say(_goes_on(store, restarts, settings.cluster.restarts, wait_s))
        await asyncio.sleep(wait_s)
        resumed = settings.checkpoint.model_copy(update={"resume": "auto"})
        settings = settings.model_copy(update={"checkpoint": resumed})


def _goes_on(store: CheckpointStore, restarts: Restarts, limit: int, wait_s: float) -> str:
    newest = store.latest()
    where = "from its beginning, there being no checkpoint yet" if newest is None else f"from {newest}"
    return f"its roles are started again in {wait_s:g} s ({restarts.in_a_row} of {limit}), and the run goes on {where}"


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
    clear_rollout_log(settings, directory, resuming=ours)
    keep_settings(settings, directory, resuming=ours)
    placement = place_roles(settings)
    if settings.cluster != ClusterSettings():
        console.say(picture(placement))
    cluster = await stack.enter_async_context(open_cluster(settings, placement, ending.end, console.say))
    serve_judge = partial(embedded_server, on_end=partial(_environments_died, ending))
    settings = await open_judges(
        settings, cluster, lambda served, words: serve_judge(served, words=words), stack, console.say
    )
    serve = partial(serve_judge, words=cluster.server_arguments())
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
    trains_here = settings.backend.kind == "torch"
    # Where ranks train and servers sample, the one that is here is there to be asked for names and shapes.
    computes = trains_here or settings.inference.embedded or settings.warm_start is not None
    policy = build_policy(settings, trained=trains_here, computes=computes)
    policy.renderer.template.say = console.say
    keep_tokenizer(policy.tokenizer, directory)
    pool = await stack.enter_async_context(open_environments(settings, console, serve))
    await check_streams(streams, pool)
    panels = await build_panels(settings, pool)
    made = await stack.enter_async_context(open_models(settings, policy, directory, console, cluster))
    models, state = await _start(settings, store, checkpoint, policy, pool, source, console, made)
    if (reason := models.policy.why_not_shared) is not None:
        console.say(
            f"shared prefixes: {reason}; tokens of rows that begin alike go through the model once only where a row is "
            "the beginning of another one"
        )
    recall = _recall(settings, directory, state, console)
    if recall is not None:
        stack.callback(recall.log.close)
    # An engine that shares its weights with nobody may draw while others change.
    trains_meanwhile = settings.rollout.max_staleness > 0 or not trains_here
    players = await stack.enter_async_context(
        open_players(
            settings, policy, pool, console, recall, trains_meanwhile=trains_meanwhile, cluster=cluster
        )
    )
    await players.publisher.publish(models.policy, state.version)
    turns = device_turns(settings, models)
    await turns.leave()
    run = RunIdentity(directory, settings.name, public_settings(settings))
    boards = open_boards(settings.tracking, run, console.say)
    tracker = Tracker(directory, settings.tracking, state.step, boards, settings.checkpoint.best_metric)
    stack.push_async_callback(asyncio.to_thread, tracker.close)
    ledger = Ledger(directory / LEDGER_FILE)
    stack.callback(ledger.close)
    ledger.roll_back(state.next_task, state.step, state.untrained)
    playing = await stack.enter_async_context(open_player(settings, policy, players, console))
    evaluator = Evaluator(settings, playing, pool, console, panels, source)

    async def evaluate(step: int) -> None:
        every = settings.evaluation.every
        if every and step % every == 0 and step < settings.steps:
            scores = await evaluator.measure(whole=settings.evaluation.interim_episodes is None)
            tracker.metrics(step, as_metrics(scores))
            evaluator.say(f"step {step}", scores)
        if step == state.step + 1 and (named := settings.checkpoint.best_metric) is not None:
            _say_if_unmeasured(named, tracker.names, console)

    before = None
    if not tracker.evaluated(state.step):  # by a process that was killed before it could
        if state.step == 0:
            before = await _measure_start(evaluator, tracker)
        else:
            await evaluate(state.step)
    scheduler = _scheduler(settings, playing, pool, source, ledger, state, console, recall)
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
        publisher=players.publisher,
        client=players.client,
        build_rows=row_builder(settings.rows),
        ledger=ledger,
        tracker=tracker,
        console=console,
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
        work=training_work(settings, policy.model.config.to_dict()),
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
            console.say(await asyncio.to_thread(_save_policy, models.policy, policy, directory))
        console.say(f"curves: {plot_run(directory, settings.name)}")


def _environments_died(ending: Ending, error: Exception) -> None:
    """End this try at the run: the environment server that was started for it is gone."""
    ending.end(RoleDiedError("environment", str(error)))


def _say_if_unmeasured(named: str, measured: set[str], console: RunConsole) -> None:
    """Say that nothing measures the metric that checkpoints are chosen by."""
    if named not in measured:
        near = difflib.get_close_matches(named, measured, n=3)
        console.say(
            f"checkpoint.best_metric: this run does not measure '{named}', so checkpoints are kept by age alone; "
            + (f"did you mean {' or '.join(near)}?" if near else "metrics.jsonl has the names")
        )


def _save_policy(backend: TrainBackend, policy: Policy, directory: Path) -> str:
    """Write what was trained for other tools, and return a line about it."""
    if backend.has_adapter:
        folder = directory / ADAPTER_FOLDER
        backend.save_adapter(folder)
        said = f"adapters: {folder} (roll-train export adds them to the model's weights)"
    else:
        folder = directory / MODEL_FOLDER
        backend.save(folder)
        said = f"model: {folder}"
    policy.tokenizer.save_pretrained(folder)
    return said


async def _start(
    settings: RunSettings,
    store: CheckpointStore,
    checkpoint: Checkpoint | None,
    policy: Policy,
    pool: EnvironmentPool,
    source: TaskSource,
    console: RunConsole,
    made: ModelSource,
) -> tuple[Models, RunState]:
    """Return the models as they go on or begin; a warm start is made where one is wanted, and saved."""
    if checkpoint is not None:
        models = await asyncio.to_thread(made.models)
        try:
            await asyncio.to_thread(models.load_state_dicts, checkpoint.parts)
        except ValueError as error:
            raise CheckpointError(f"cannot resume from {checkpoint.folder}: {error}") from error
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
    backend = await asyncio.to_thread(made.warm_start, warm.learning_rate)
    work = train_supervised(
        backend,
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
    await asyncio.to_thread(made.end_warm_start, backend)


def _scheduler(
    settings: RunSettings,
    playing: PolicyPlayer,
    pool: EnvironmentPool,
    source: TaskSource,
    ledger: Ledger,
    state: RunState,
    console: RunConsole,
    recall: Recall | None,
) -> RolloutScheduler:
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
    )

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
        times_aside=recall.rounds(rollout_settings.max_attempts) if recall is not None else None,
    )


def _recall(settings: RunSettings, directory: Path, state: RunState, console: RunConsole) -> Recall | None:
    """Open the rollout log, and say what of it is taken up again."""
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


async def _measure_start(evaluator: Evaluator, tracker: Tracker) -> dict[str, Score]:
    """Measure where the run begins, once."""
    baselines = await evaluator.baselines()
    evaluator.say("baseline", baselines)
    before = await evaluator.measure(whole=True)
    evaluator.say("start", before)
    tracker.metrics(0, as_metrics(before) | as_metrics(baselines))
    return before
