"""Learners from a run's episodes: the algorithm, by their rewards, or distillation, from a teacher.

Teachers are models beside the student, servers that score its tokens, or the student itself.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.backends.batching import Plans
from rollgym.trainer.backends.distillation_head import Distance, DistillationHead
from rollgym.trainer.backends.forward_pass import ForwardPass
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.packing import sharing_and_packing
from rollgym.trainer.backends.reference import FrozenModel
from rollgym.trainer.config.model import check_model_path
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.config.supervised import DistillSettings, TeacherSettings
from rollgym.trainer.core.device import DTYPES
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.server_client.client import ServerClient
from rollgym.trainer.learn.distilling import (
    ComputedRows,
    DistillationLearner,
    Hindsight,
    HindsightRows,
    RowSource,
    ScoredRows,
    Teacher,
)
from rollgym.trainer.learn.health import Learning
from rollgym.trainer.learn.learner import Learner, Models
from rollgym.trainer.learn.pipelines.rl import Updater
from rollgym.trainer.models.load import load_model, load_tokenizer, model_folder
from rollgym.trainer.models.weights import place
from rollgym.trainer.run.policy import Policy

_SCORED_AT_ONCE = 64
"""Rows per scoring request to a server."""


def teacher_of(settings: DistillSettings, domain: str) -> int:
    """Return the number of the teacher of a domain.

    Raises:
        ConfigError: If it has none.
    """
    otherwise = None
    for number, teacher in enumerate(settings.teachers.values()):
        if domain in teacher.domains:
            return number
        if not teacher.domains:
            otherwise = number
    if otherwise is None:
        raise ConfigError(
            f"distill.teachers: nobody teaches the domain '{domain}': name it at one of them, or have one without "
            "domains"
        )
    return otherwise


def distillation_head(
    settings: RunSettings, distill: DistillSettings, model: PreTrainedModel
) -> DistillationHead:
    """Return the student's head that computes its distance to teachers in the same process.

    Raises:
        ConfigError: If a teacher cannot be loaded.
    """
    distance = Distance(
        distill.divergence,
        distill.weight,
        distill.temperature,
        distill.top_k if distill.estimate == "top_k" else None,
        distill.likelihood,
    )
    return DistillationHead(
        model, [_model(settings, each, model) for each in distill.teachers.values()], distance
    )


def check_teachers(settings: DistillSettings, tokenizer: object) -> None:
    """Refuse teachers that are not there, or read other tokens than the student.

    Args:
        settings: The teachers.
        tokenizer: The student's.

    Raises:
        ConfigError: If there is such a teacher; the message names it.
    """
    for name, teacher in settings.teachers.items():
        if teacher.path is None:
            continue
        theirs = _tokenizer(f"distill.teachers.{name}.path", teacher.path)
        if theirs.get_vocab() != tokenizer.get_vocab():  # type: ignore[attr-defined]
            raise ConfigError(
                f"distill.teachers.{name}: its tokens are not the student's, so their distributions cannot be "
                "compared: take a teacher of the same family"
            )


def check_reference(path: str, tokenizer: Any, rows: Iterable[TrainRow]) -> None:
    """Refuse a reference for which tokens of the examples are other ones than for the policy.

    Args:
        path: `dpo.reference`, a folder or a name on the hub.
        tokenizer: The policy's.
        rows: The examples.

    Raises:
        ConfigError: If a token id means another token to it than to the policy, or it has no tokenizer.
    """
    used = sorted({number for row in rows for number in row.ids.unique().tolist()})
    theirs = _tokenizer("dpo.reference", path).convert_ids_to_tokens(used)
    for number, own, other in zip(used, tokenizer.convert_ids_to_tokens(used), theirs, strict=True):
        if own != other:
            raise ConfigError(
                f"dpo.reference: token {number} is {own!r} for the policy and {other!r} for {path}, so their "
                "log-probabilities cannot be compared: take a reference of the same family"
            )


def _tokenizer(setting: str, path: str) -> Any:
    """Load the tokenizer of a model that is not the policy's; errors name the setting that names it."""
    check_model_path(path, setting)
    folder = model_folder(path, setting)
    try:
        return load_tokenizer(folder)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error


def _model(settings: RunSettings, teacher: TeacherSettings, student: PreTrainedModel) -> PreTrainedModel:
    assert teacher.path is not None
    dtype = DTYPES[settings.model.dtype]
    model = load_model(model_folder(teacher.path), dtype, settings.model.attention)
    place(model, dtype, student.device)
    return model


@asynccontextmanager
async def open_teachers(
    settings: RunSettings, distill: DistillSettings, student: PreTrainedModel
) -> AsyncIterator[list[Teacher]]:
    """Open the scorers of the student's own tokens, in the order of the settings.

    Raises:
        ConfigError: If one cannot be had.
        ConnectionError: If a server does not answer.
    """
    async with AsyncExitStack() as stack:
        teachers: list[Teacher] = []
        for name, teacher in distill.teachers.items():
            if teacher.url is None:
                teachers.append(ModelTeacher(_scorer(settings, teacher, student)))
                continue
            if settings.rollout.temperature != 1.0:
                raise ConfigError(
                    f"distill.teachers.{name}.url scores tokens at temperature 1: leave rollout.temperature at 1.0, or "
                    "name the teacher's path"
                )
            key = None
            if teacher.api_key_variable is not None:
                key = os.environ.get(teacher.api_key_variable)
                if key is None:
                    raise ConfigError(
                        f"distill.teachers.{name}.api_key_variable: {teacher.api_key_variable} is not set in the "
                        "environment"
                    )
            client = ServerClient(
                teacher.url, teacher.dialect, way=None, api_key=key, patience_s=teacher.timeout_s
            )
            teachers.append(ServedTeacher(await stack.enter_async_context(client)))
        yield teachers


def reading_pass(settings: RunSettings, head: PolicyHead, plans: Plans | None = None) -> ForwardPass:
    """Return what computes the outputs of a policy that is read and not trained, in this process."""
    optimizer, dtype = settings.optimizer, DTYPES[settings.model.dtype]
    costs, packs = sharing_and_packing(
        head, optimizer.shared_prefixes, optimizer.packed_rows, head.body.device, dtype
    )
    return ForwardPass(head, optimizer.micro_batch_tokens, costs, plans, packs=packs)


def _scorer(settings: RunSettings, teacher: TeacherSettings, student: PreTrainedModel) -> FrozenModel:
    head = PolicyHead(_model(settings, teacher, student), settings.rollout.temperature)
    return FrozenModel(reading_pass(settings, head))


class ModelTeacher:
    """A model in this process that scores tokens."""

    def __init__(self, scorer: FrozenModel) -> None:
        self._scorer = scorer

    async def logprobs(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return the log-probabilities of the marked tokens of rows, `[tokens]` each, zero elsewhere."""
        return await asyncio.to_thread(self._scorer.forward, rows)


class ServedTeacher:
    """An inference server that scores tokens.

    Args:
        client: The server, connected.
    """

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._places = asyncio.Semaphore(_SCORED_AT_ONCE)

    async def logprobs(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return the log-probabilities of the marked tokens of rows, `[tokens]` each, zero elsewhere."""
        return list(await asyncio.gather(*(self._of_row(row) for row in rows)))

    async def _of_row(self, row: TrainRow) -> Tensor:
        async with self._places:
            scores = await self._client.score(row.ids.tolist())
        return torch.where(row.mask, torch.tensor([0.0, *scores]), 0.0)


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
