"""Teachers of distillation: models beside the student, servers that score its tokens, or the student itself."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.backends.distillation_head import Distance, DistillationHead
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.packing import packs_rows
from rollgym.trainer.backends.prefix_costs import sharing_costs
from rollgym.trainer.backends.reference import FrozenModel
from rollgym.trainer.config.distillation import DistillSettings, TeacherSettings
from rollgym.trainer.config.model_paths import check_model_path
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.device import DTYPES
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.server_client import ServerClient
from rollgym.trainer.learn.distilling import Teacher
from rollgym.trainer.models.load import load_model, load_tokenizer, model_folder
from rollgym.trainer.models.weights import place

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
    try:
        return load_tokenizer(model_folder(path))
    except ConfigError as error:
        raise ConfigError(f"{setting}: {str(error).removeprefix('model.path: ')}") from error


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


def _scorer(settings: RunSettings, teacher: TeacherSettings, student: PreTrainedModel) -> FrozenModel:
    head = PolicyHead(_model(settings, teacher, student), settings.rollout.temperature)
    costs = sharing_costs(head, settings.optimizer.shared_prefixes, student.device)
    dtype = DTYPES[settings.model.dtype]
    packs = packs_rows(head, settings.optimizer.packed_rows, student.device, dtype)
    return FrozenModel(head, settings.optimizer.micro_batch_tokens, costs, packs=packs)


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
