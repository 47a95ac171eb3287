"""`roll-train`: the parts of a run, put together and set going."""

import copy
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch

from trainer.assembly import (
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
from trainer.backends.torch_backend import TorchBackend
from trainer.checkpoint import CheckpointStore, RunState, load_checkpoint
from trainer.config.run import RunSettings
from trainer.console import RunConsole
from trainer.demonstrations import collect_demonstrations
from trainer.evaluate import Score
from trainer.evaluation import Evaluator, as_metrics, build_panels
from trainer.learner import Learner, Models
from trainer.ledger import LEDGER_FILE, Ledger
from trainer.models.load import save_model
from trainer.pipelines import rl
from trainer.pipelines.sft import supervised_rows, train_supervised
from trainer.plots import plot_run
from trainer.plugins import Plugin, load_plugin
from trainer.resume import clear_records, keep_settings, resume_folder
from trainer.rollout.admission import AdmissionWindow
from trainer.rollout.context import context_policy
from trainer.rollout.environments import EnvironmentPool
from trainer.rollout.episodes import EpisodePlayer
from trainer.rollout.prompts import PromptBuilder
from trainer.rollout.scheduler import GroupPlan, RolloutScheduler
from trainer.rows import row_builder
from trainer.tasks.data_check import check_streams, keep_digests
from trainer.tasks.dataset import row_streams
from trainer.tasks.task import TaskSource
from trainer.tracking import Tracker
from trainer.weights.publisher import WeightPublisher


async def train(settings: RunSettings) -> int:
    """Train a policy, from the start or from the newest checkpoint."""
    directory = Path(settings.output_dir)
    store = CheckpointStore(directory / "checkpoints", settings.checkpoint.keep)
    folder = resume_folder(settings, store)
    keep_settings(settings, directory, resuming=folder is not None)
    source = task_source(settings)
    streams = row_streams(source)
    keep_digests(streams, directory, resuming=folder is not None)
    torch.set_num_threads(settings.threads)
    async with AsyncExitStack() as stack:
        console = RunConsole(settings.steps, live=settings.tracking.console)
        stack.callback(console.close)
        state, saved = (RunState(0, 0, 0, ()), None) if folder is None else load_checkpoint(folder)
        if folder is not None:
            console.say(f"resuming at step {state.step} from {folder}")
            if folder != store.latest() and store.holds(folder):
                store.go_back_to(folder, state.step)
        elif clear_records(directory):
            console.say(
                f"the run in {directory} left no checkpoint: it begins again, and its records with it"
            )
        policy = build_policy(settings)
        pool = await stack.enter_async_context(open_environments(settings, console))
        await check_streams(streams, pool)
        panels = await build_panels(settings, pool)
        if saved is None and settings.warm_start is not None:
            await _warm_start(settings, policy, pool, source, console)
        models = _models(settings, policy, saved)
        players = await stack.enter_async_context(open_players(settings, policy, pool))
        publisher = WeightPublisher([players.client])
        await publisher.publish(models.policy, state.version)
        tracker = Tracker(directory, settings.tracking, state.step)
        stack.callback(tracker.close)
        ledger = Ledger(directory / LEDGER_FILE)
        stack.callback(ledger.close)
        ledger.roll_back(state.next_task, state.step, state.untrained)
        evaluator = Evaluator(settings, policy, players, pool, console, panels, source)
        before = await _measure_start(evaluator, tracker, resuming=folder is not None)
        scheduler = _scheduler(settings, policy, players, pool, source, ledger, state, console)
        stack.push_async_callback(scheduler.close)

        async def evaluate(step: int) -> None:
            every = settings.evaluation.every
            if every and step % every == 0 and step < settings.steps:
                scores = await evaluator.measure(whole=settings.evaluation.interim_episodes is None)
                tracker.metrics(step, as_metrics(scores))
                evaluator.say(f"step {step}", scores)

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
            engine=players.engine,
            build_rows=row_builder(settings.rows),
            ledger=ledger,
            tracker=tracker,
            console=console,
            checkpoints=store,
        )
        await rl.train(parts, state, settings.steps, settings.checkpoint.every, evaluate)
        await scheduler.close()
        after = await evaluator.measure(whole=True)
        tracker.metrics(settings.steps, as_metrics(after))
        evaluator.say("end", after)
        if before is not None:
            evaluator.say_gain(before, after)
        save_model(policy.model, policy.tokenizer, directory / "model")
    console.say(f"model: {directory / 'model'}")
    console.say(f"curves: {plot_run(directory, settings.name)}")
    return 0


async def _warm_start(
    settings: RunSettings, policy: Policy, pool: EnvironmentPool, source: TaskSource, console: RunConsole
) -> None:
    warm = settings.warm_start
    assert warm is not None
    context = context_policy(settings.prompt)
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
    train_supervised(
        warm_start_backend(settings, policy.model, warm.learning_rate),
        rows,
        epochs=warm.epochs,
        batch_rows=warm.batch_rows,
        seed=settings.seed,
        max_skipped_steps=settings.optimizer.max_skipped_steps,
        report=lambda epoch, loss: console.say(
            f"warm start, epoch {epoch + 1}/{warm.epochs}: loss {loss:.4f}"
        ),
    )


def _models(settings: RunSettings, policy: Policy, saved: dict[str, Any] | None) -> Models:
    models = Models(
        policy=policy_backend(settings, policy.model),
        critic=critic_backend(settings, policy.model) if settings.algorithm.critic is not None else None,
        reference=_reference(settings, policy) if settings.algorithm.needs_reference else None,
    )
    if saved is not None:
        models.policy.load_state_dict(saved["policy"])
        if models.critic is not None:
            models.critic.load_state_dict(saved["critic"])
        if models.reference is not None:
            models.reference.load_state_dict(saved["reference"])
    return models


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
    return RolloutScheduler(source, window, player.play, plan, ledger, players.slots, console.say)


def _plugin(path: str | None, setting: str) -> Plugin | None:
    return None if path is None else load_plugin(path, setting)


async def _measure_start(
    evaluator: Evaluator, tracker: Tracker, *, resuming: bool
) -> dict[str, Score] | None:
    """Measure where the run begins, once; a resumed run has done so before."""
    if resuming:
        return None
    baselines = await evaluator.baselines()
    evaluator.say("baseline", baselines)
    before = await evaluator.measure(whole=True)
    evaluator.say("start", before)
    tracker.metrics(0, as_metrics(before) | as_metrics(baselines))
    return before
