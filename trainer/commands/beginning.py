"""Where a run begins to train: its models as a checkpoint has them, or fresh ones after a warm start."""

import asyncio

from trainer.assembly.build import Policy
from trainer.assembly.models import ModelSource
from trainer.config.run import RunSettings
from trainer.config.supervised import WarmStartSettings
from trainer.core.console import RunConsole
from trainer.core.ending import to_its_end
from trainer.evaluation.demonstrations import collect_demonstrations
from trainer.learn.learner import Models
from trainer.learn.pipelines.sft import supervised_rows, train_supervised
from trainer.records.checkpoint import Checkpoint, CheckpointError, CheckpointStore, RunState
from trainer.rollout.context import context_policy
from trainer.rollout.environments import EnvironmentPool
from trainer.rollout.prompts import PromptBuilder
from trainer.tasks.task import TaskSource


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
