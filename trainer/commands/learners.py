"""Learners from a run's episodes: the algorithm, by their rewards, or distillation, from a teacher."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

from rollgym.trainer.assembly.policy import Policy
from rollgym.trainer.assembly.teachers import check_teachers, open_teachers, teacher_of
from rollgym.trainer.config.distillation import DistillSettings
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.learn.distilling import (
    ComputedRows,
    DistillationLearner,
    HindsightRows,
    RowSource,
    ScoredRows,
)
from rollgym.trainer.learn.health import Learning
from rollgym.trainer.learn.hindsight import Hindsight
from rollgym.trainer.learn.learner import Learner, Models
from rollgym.trainer.learn.pipelines.rl import Updater


def reward_learner(
    settings: RunSettings, models: Models, say: Callable[[str], None] = lambda text: None
) -> Learner:
    """Return the learner from rewards; `say` receives messages for people about skipped optimizer steps."""
    return Learner(
        settings.algorithm,
        models,
        settings.seed,
        max_skipped_steps=settings.optimizer.max_skipped_steps,
        truncated=settings.rollout.truncates,
        router_replay=settings.optimizer.router_replay,
        say=say,
    )


async def make_learner(
    settings: RunSettings,
    models: Models,
    policy: Policy,
    stack: AsyncExitStack,
    say: Callable[[str], None] = lambda text: None,
) -> Updater:
    """Return the learner from a run's episodes.

    Args:
        settings: The run.
        models: Models to train and to read.
        policy: The policy's tokenizer and renderer.
        stack: Closes the resources that the learner opens.
        say: Receives messages for people about skipped optimizer steps.

    Raises:
        ConfigError: If a teacher cannot be loaded.
        ConnectionError: If a teacher's server does not answer.
    """
    distill = settings.distill
    if distill is None:
        return reward_learner(settings, models, say)
    return DistillationLearner(
        models.policy,
        await _row_source(settings, distill, models, policy, stack),
        sampled=distill.estimate == "sampled",
        largest_ratio=distill.largest_ratio,
        max_skipped_steps=settings.optimizer.max_skipped_steps,
        say=say,
    )


def learning_of(settings: RunSettings) -> Learning:
    """Return what a run learns from."""
    algorithm = settings.algorithm
    return Learning(
        rewards=settings.distill is None,
        paid_alike=algorithm.advantage.follows_rewards,
        advantages=algorithm.surrogate.follows_advantages and not algorithm.positive_nll.coefficient,
    )


async def _row_source(
    settings: RunSettings,
    distill: DistillSettings,
    models: Models,
    policy: Policy,
    stack: AsyncExitStack,
) -> RowSource:
    if distill.feedback is not None:
        hindsight = Hindsight(policy.renderer, distill.feedback, settings.model.max_length)
        return HindsightRows(models.policy, hindsight)
    await asyncio.to_thread(check_teachers, distill, policy.tokenizer)
    if distill.estimate != "sampled":
        return ComputedRows(lambda domain: teacher_of(distill, domain))
    teachers = await stack.enter_async_context(open_teachers(settings, distill, policy.model))
    return ScoredRows(teachers, lambda domain: teacher_of(distill, domain))
