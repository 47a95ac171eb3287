"""The student's head for distillation: the distance of its distribution from the teacher's, token by token.

Teacher and student are computed side by side, and the logits of only some tokens are in memory at one time. So
the whole vocabulary costs time, and no memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollgym.trainer.algorithms.distillation import divergence, with_rest
from rollgym.trainer.algorithms.modes import Divergence
from rollgym.trainer.backends.base import EntropyMode
from rollgym.trainer.backends.heads import LOGITS_AT_ONCE, Head, LogitsReader, in_parts
from rollgym.trainer.backends.prefix_cache import SharedTokens
from rollgym.trainer.backends.routing import RoutedModel
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.pictures import ImageTensors

NO_PICTURES = "distill: teachers see no pictures: have the environment show text"
"""What is said where a student that sees is to be taught."""

TEACHER_FIELD = "teacher"
"""The field of rows that says by its number which of several teachers a token is learnt from."""


@dataclass(frozen=True, slots=True)
class Distance:
    """What is computed of each token.

    Attributes:
        kind: The divergence.
        weight: Weight of the mixture, for a divergence that has one.
        temperature: Divides the logits of both.
        top_k: How many of the teacher's likeliest tokens are distinguished; all others count as one token. None: the
            whole vocabulary.
        likelihood: Share of the row's own negative log-likelihood in the number.
    """

    kind: Divergence
    weight: float = 0.5
    temperature: float = 1.0
    top_k: int | None = None
    likelihood: float = 0.0


class DistillationHead(Head):
    """The loss of each token: its divergence, mixed with its negative log-likelihood if `likelihood` is above 0.

    Args:
        model: The student.
        teachers: The teachers; they stay as they are. With several, rows have the field `teacher`.
        distance: What is computed.
        logits_at_once: Bound on the numbers of one model's logits that are held at one time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        teachers: Sequence[PreTrainedModel],
        distance: Distance,
        logits_at_once: int = LOGITS_AT_ONCE,
    ) -> None:
        super().__init__()
        self.model: PreTrainedModel = model
        self.teachers = nn.ModuleList(teachers).requires_grad_(requires_grad=False)
        self._distance = distance
        self._routed = RoutedModel(model)
        self._student = LogitsReader(model)
        self._readers = [LogitsReader(teacher) for teacher in teachers]
        vocabularies = [reader.vocabulary for reader in (self._student, *self._readers)]
        # Models of one tokenizer may pad their vocabularies to different sizes: the last ids are padding.
        self._vocabulary = min(vocabularies)
        self._tokens_at_once = max(1, logits_at_once // max(vocabularies))

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields of rows that it reads."""
        return (TEACHER_FIELD,) if len(self.teachers) > 1 else ()

    @property
    def body(self) -> PreTrainedModel:
        """The student without its output embedding."""
        return self._student.body

    @cached_property
    def why_not_shared(self) -> str | None:
        """Why student or teacher cannot compute segments behind a prefix; None if both can."""
        readers = (self._student, *self._readers)
        return next((why for each in readers if (why := each.why_not_shared) is not None), None)

    @cached_property
    def why_not_packed(self) -> str | None:
        """Why student or teacher cannot compute rows behind each other; None if both can."""
        readers = (self._student, *self._readers)
        return next((why for each in readers if (why := each.why_not_packed) is not None), None)

    def forward(
        self,
        ids: Tensor,
        row: Tensor,
        column: Tensor,
        entropy: EntropyMode,
        shared: SharedTokens | None = None,
        experts: Tensor | None = None,
        images: ImageTensors | None = None,
        fields: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss of each token and, if asked, the student's entropy at it.

        Args:
            ids: Padded token ids, `[rows, tokens]`.
            row: Rows of the tokens, int64 `[n]`.
            column: Their columns, int64 `[n]`, never 0.
            entropy: Whether entropies are wanted.
            shared: The same tokens laid out so that those of several rows are computed once.
            experts: Experts that the student's routers take; the teachers' choose.
            images: Pictures among the tokens; none can be taught about.
            fields: With several teachers, the number of each token's, int64 `[n]`.
        """
        if images is not None:
            raise ConfigError(NO_PICTURES)
        if fields is None:
            return super().forward(ids, row, column, entropy, shared, experts, images)
        self._take(experts)
        states = self._states(ids, row, column, shared, None)
        # One token may be learnt from several teachers, in rows that share it.
        states = states if shared is None else states[shared.which]
        return self._by_teacher(states, ids[row, column], fields[TEACHER_FIELD], entropy)

    def _take(self, experts: Tensor | None) -> None:
        self._routed.take(experts)

    def _states(
        self,
        ids: Tensor,
        row: Tensor,
        column: Tensor,
        shared: SharedTokens | None,
        images: ImageTensors | None,
    ) -> Tensor:
        """Return the states of the student and of all teachers, one behind the other."""
        student = self._student.states(ids, row, column, shared)
        with torch.no_grad():
            taught = [reader.states(ids, row, column, shared) for reader in self._readers]
        return torch.cat([student, *taught], dim=-1)

    def _read(self, states: Tensor, targets: Tensor, entropy: EntropyMode) -> tuple[Tensor, Tensor | None]:
        """Return the loss of each token by the first teacher."""
        return self._losses(0, states, targets, entropy)

    def _by_teacher(
        self, states: Tensor, targets: Tensor, which: Tensor, entropy: EntropyMode
    ) -> tuple[Tensor, Tensor | None]:
        """Compute tokens teacher by teacher, and put them back in their order."""
        losses = torch.zeros(len(targets), device=states.device)
        spread = None if entropy == "none" else torch.zeros_like(losses)
        for number in range(len(self._readers)):
            (indices,) = (which == number).nonzero(as_tuple=True)
            part, its = self._losses(number, states[indices], targets[indices], entropy)
            losses = losses.index_put((indices,), part)
            if spread is not None and its is not None:
                spread = spread.index_put((indices,), its)
        return losses, spread

    def _losses(
        self, number: int, states: Tensor, targets: Tensor, entropy: EntropyMode
    ) -> tuple[Tensor, Tensor | None]:
        widths = [self._student.width, *(reader.width for reader in self._readers)]
        parts = states.split(widths, dim=-1)
        teacher, student, taught = self._readers[number], parts[0], parts[1 + number]
        compute = partial(self._token_losses, teacher, entropy)
        return in_parts(compute, (student, taught, targets), self._tokens_at_once)

    def _token_losses(
        self, teacher: LogitsReader, entropy: EntropyMode, student: Tensor, taught: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        distance = self._distance
        logits = self._student.logits(student)[:, : self._vocabulary].float()
        with torch.no_grad():
            goal = teacher.logits(taught)[:, : self._vocabulary].float() / distance.temperature
            goal = goal.log_softmax(dim=-1)
        now = (logits / distance.temperature).log_softmax(dim=-1)
        own, goals = now, goal
        if distance.top_k is not None and distance.top_k < goal.shape[-1]:
            likeliest = goal.topk(distance.top_k, dim=-1).indices
            own, goals = with_rest(now.gather(-1, likeliest)), with_rest(goal.gather(-1, likeliest))
        losses = divergence(own, goals, distance.kind, distance.weight)
        if distance.likelihood:
            chosen = logits.log_softmax(dim=-1).gather(-1, targets[:, None])[:, 0]
            losses = (1.0 - distance.likelihood) * losses - distance.likelihood * chosen
        if entropy == "none":
            return losses, None
        plain = logits.detach().log_softmax(dim=-1)
        return losses, -(plain.exp() * plain).sum(dim=-1)
