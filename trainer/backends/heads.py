"""Heads that compute a loss's inputs: log-probabilities and entropies of tokens, or values of the states before them.

A head is one module with one forward, and is called as a whole. Wrappers that shard a model gather its weights around
the forward of the module that they wrap: code that calls its parts would compute with pieces of weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rollgym.trainer.backends.base import EntropyMode
from rollgym.trainer.backends.prefix_cache import (
    SharedTokens,
    hidden_states,
    logits_of_calls,
    why_not_packed,
    why_not_shared,
)
from rollgym.trainer.backends.routing import RoutedModel, no_experts
from rollgym.trainer.models.language_head import LanguageHead, own_logits, state_width
from rollgym.trainer.models.pictures import ImageTensors, tokens_or_embeddings
from rollgym.trainer.models.value_head import ValueModel

_WHOLE = "its logits are made by its whole forward, and not of its last hidden states alone"


class LogitsReader:
    """States of tokens, and the logits that the model's own code makes of them.

    A state is the last hidden one, of which logits can be made part by part. Models whose logits are made of more than
    that, or whose forward calls a part of its body (OPT), compute all of a micro-batch's at once: there the logits are
    the state.

    Args:
        model: A causal language model. Its weights are shared, not copied.

    Attributes:
        vocabulary: Logits of a token.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # Taken now: a model that is sharded later holds pieces of it.
        self._hidden = state_width(model)
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])
        head = LanguageHead(model)
        self._head = head if head.is_whole() else None

    @property
    def body(self) -> PreTrainedModel:
        """The language model without its output embedding."""
        body = self._model.base_model
        assert isinstance(body, PreTrainedModel)
        return body

    @property
    def width(self) -> int:
        """How many numbers a state holds: the last dimension of `states`."""
        return self.vocabulary if self._head is None else self._hidden

    @property
    def why_not_shared(self) -> str | None:
        """Why it cannot compute segments behind a prefix; None if it can."""
        return _WHOLE if self._head is None else why_not_shared(self.body)

    @property
    def why_not_packed(self) -> str | None:
        """Why it cannot compute rows behind each other; None if it can."""
        return _WHOLE if self._head is None else why_not_packed(self.body)

    def states(
        self,
        ids: Tensor,
        row: Tensor,
        column: Tensor,
        shared: SharedTokens | None,
        images: ImageTensors | None = None,
    ) -> Tensor:
        """Return the states that tokens are drawn from, `[n, width]`; of those that are shared, the distinct ones.

        Args:
            ids: Padded token ids, `[rows, tokens]`.
            row: Rows of the tokens, int64 `[n]`.
            column: Their columns, int64 `[n]`, never 0.
            shared: The same tokens laid out so that those of several rows are computed once.
            images: Pictures among the tokens.
        """
        if self._head is None and shared is not None:
            return logits_of_calls(self._model, shared.calls)
        if self._head is None:
            return own_logits(self._model, ids, row, column - 1, images)
        if shared is not None:
            return hidden_states(self.body, shared.calls)
        given = tokens_or_embeddings(self.body, ids, images)
        states: Tensor = self.body(**given, use_cache=False).last_hidden_state
        return states[row, column - 1]

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of states, `[n, vocabulary]`."""
        return states if self._head is None else self._head.logits(states)


LOGITS_AT_ONCE = 2**26
"""Numbers of logits that are held at one time (256 MiB in float32), where the head allows to compute them in parts."""


def in_parts(
    compute: Callable[..., tuple[Tensor, Tensor | None]], tensors: Sequence[Tensor], at_once: int
) -> tuple[Tensor, Tensor | None]:
    """Return what `compute` makes of tokens, of very many part by part.

    Logits are then computed once more for the gradient, so that those of one part are held at a time.

    Args:
        compute: Makes outputs and entropies `[n]`, or None in their place, of tensors of `n` tokens.
        tensors: What it reads of the tokens, `[n, ...]` each.
        at_once: Tokens of a part.
    """
    if len(tensors[0]) <= at_once:
        return compute(*tensors)
    parts = [
        checkpoint(compute, *part, use_reentrant=False, preserve_rng_state=False)
        for part in zip(*(each.split(at_once) for each in tensors), strict=True)
    ]
    outputs = torch.cat([part[0] for part in parts])
    return outputs, None if parts[0][1] is None else torch.cat([part[1] for part in parts])


class Head(nn.Module, ABC):
    """Turns token ids into a number for some of the tokens.

    Attributes:
        model: All that is trained.
    """

    model: nn.Module

    @property
    def reads(self) -> tuple[str, ...]:
        """Fields of rows that the forward is given, as `fields`, for each of the tokens; none for most heads."""
        return ()

    @property
    @abstractmethod
    def body(self) -> PreTrainedModel:
        """The part of the model that makes hidden states."""

    @cached_property
    def why_not_shared(self) -> str | None:
        """Why it cannot compute segments behind a prefix; None if it can. First asked before the model is wrapped."""
        return why_not_shared(self.body)

    @cached_property
    def why_not_packed(self) -> str | None:
        """Why it cannot compute rows behind each other; None if it can. First asked before the model is wrapped."""
        return why_not_packed(self.body)

    def forward(
        self,
        ids: Tensor,
        row: Tensor,
        column: Tensor,
        entropy: EntropyMode,
        shared: SharedTokens | None = None,
        experts: Tensor | None = None,
        images: ImageTensors | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs and entropies `[n]` of some tokens, given those before each in its row.

        Args:
            ids: Padded token ids, `[rows, tokens]`.
            row: Rows of the tokens, int64 `[n]`.
            column: Their columns, int64 `[n]`, never 0.
            entropy: Whether entropies are wanted.
            shared: The same tokens laid out so that those of several rows are computed once. It changes nothing else.
            experts: Experts to take in place of those that the policy's routers choose, `[rows, tokens, layers *
                taken]`, -1 to let the router choose. A critic is another model, whose routers always choose.
            images: Pictures among the tokens. Rows that hold some share nothing.
        """
        self._take(experts)
        states = self._states(ids, row, column, shared, images)
        if shared is None:
            return self._read(states, ids[row, column], entropy)
        outputs, spread = self._read(states, shared.targets, entropy)
        return outputs[shared.which], None if spread is None else spread[shared.which]

    def keep_experts(self, *, wanted: bool) -> None:
        """Have forwards keep the experts that tokens take, or no longer.

        Raises:
            ConfigError: If there are none whose choice is known.
        """
        if wanted:
            raise no_experts()

    def kept_experts(self, rows: int, tokens: int) -> Tensor:
        """Return those of the last forward, int16 `[rows, tokens, layers * taken]`, zeros where others know them.

        Args:
            rows: Rows of that forward.
            tokens: Length that they were filled up to.
        """
        raise no_experts()

    def whole_experts(self, own: Tensor) -> Tensor:
        """Combine results of `kept_experts` over the ranks that compute these rows, which call it together."""
        return own

    def _take(self, experts: Tensor | None) -> None:
        """Have routers take experts, or choose them; a head whose routers always choose does nothing."""

    @abstractmethod
    def _read(self, states: Tensor, targets: Tensor, entropy: EntropyMode) -> tuple[Tensor, Tensor | None]:
        """Return outputs and entropies `[n]` of tokens.

        Args:
            states: What `_states` returned.
            targets: The tokens, int64 `[n]`.
            entropy: Whether entropies are wanted.
        """

    def _states(
        self,
        ids: Tensor,
        row: Tensor,
        column: Tensor,
        shared: SharedTokens | None,
        images: ImageTensors | None,
    ) -> Tensor:
        """Return the states that tokens are drawn from `[n, width]`; of those that are shared, the distinct ones."""
        if shared is not None:
            return hidden_states(self.body, shared.calls)
        given = tokens_or_embeddings(self.body, ids, images)
        return self.body(**given, use_cache=False).last_hidden_state[row, column - 1]


class PolicyHead(Head):
    """Log-probabilities under the distribution that replies are drawn from.

    Logits are made by the model's own code, whatever the family does to them, and only for the requested tokens; at
    most `logits_at_once` of them are held at a time.

    Args:
        model: A causal language model.
        temperature: The rollouts' sampling temperature: ratios compare equal distributions only.
        logits_at_once: Bound on the numbers of logits that are held at one time.

    Attributes:
        temperature: What logits are divided by.
        numbers_of_logits: Makes log-probabilities and entropies of logits: the function of this name, or a compiled
            form of it.
    """

    def __init__(
        self, model: PreTrainedModel, temperature: float, logits_at_once: int = LOGITS_AT_ONCE
    ) -> None:
        super().__init__()
        self.model: PreTrainedModel = model
        self.temperature = temperature
        self.numbers_of_logits = numbers_of_logits
        self._routed = RoutedModel(model)
        self._reader = LogitsReader(model)
        self._tokens_at_once = max(1, logits_at_once // self._reader.vocabulary)

    @property
    def body(self) -> PreTrainedModel:
        """The language model without its output embedding."""
        return self._reader.body

    @cached_property
    def why_not_shared(self) -> str | None:
        """Why it cannot compute segments behind a prefix; None if it can."""
        return self._reader.why_not_shared

    @cached_property
    def why_not_packed(self) -> str | None:
        """Why it cannot compute rows behind each other; None if it can."""
        return self._reader.why_not_packed

    def keep_experts(self, *, wanted: bool) -> None:
        """Have forwards keep the experts that tokens take, or no longer."""
        self._routed.keep(wanted=wanted)

    def kept_experts(self, rows: int, tokens: int) -> Tensor:
        """Return those of the last forward, int16 `[rows, tokens, layers * taken]`."""
        return self._routed.kept(rows, tokens)

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
        return self._reader.states(ids, row, column, shared, images)

    def _read(self, states: Tensor, targets: Tensor, entropy: EntropyMode) -> tuple[Tensor, Tensor | None]:
        """Return the log-probability of each token and, if asked, the entropy it was drawn with."""
        return in_parts(partial(self._of_states, entropy), (states, targets), self._tokens_at_once)

    def _of_states(
        self, entropy: EntropyMode, states: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return self.numbers_of_logits(self._reader.logits(states), targets, self.temperature, entropy)


def numbers_of_logits(
    logits: Tensor, targets: Tensor, temperature: float, entropy: EntropyMode
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each token `[n]` and, if asked, the entropy that it was drawn with.

    Args:
        logits: As the model makes them, `[n, vocabulary]`.
        targets: The tokens, int64 `[n]`.
        temperature: What logits are divided by.
        entropy: Whether entropies are wanted.
    """
    numbers = logits.float()
    # A division by one changes nothing, and reads and writes all of a vocabulary for every token.
    scaled = numbers if temperature == 1.0 else numbers / temperature
    distribution = scaled.log_softmax(dim=-1)
    # A sum of one, and no view of it: what leaves a module that is sharded must be a tensor of its own.
    chosen = distribution.gather(-1, targets[:, None]).sum(dim=-1)
    if entropy == "none":
        return chosen, None
    with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
        if entropy == "collision":
            return chosen, -(2 * distribution).logsumexp(dim=-1)
        return chosen, -(distribution.exp() * distribution).sum(dim=-1)


class ValueHead(Head):
    """Values of the states before tokens.

    Args:
        model: The critic.
    """

    def __init__(self, model: ValueModel) -> None:
        super().__init__()
        self.model: ValueModel = model

    @property
    def body(self) -> PreTrainedModel:
        """The language model below the values."""
        return self.model.body

    def _read(self, states: Tensor, targets: Tensor, entropy: EntropyMode) -> tuple[Tensor, Tensor | None]:
        """Return the value of the state before each token; token and entropy mean nothing here."""
        return self.model(states), None
