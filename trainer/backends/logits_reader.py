"""Computes the logits of a model's tokens by the model's own code, in parts or all at once."""

from torch import Tensor
from transformers import PreTrainedModel

from rollgym.trainer.backends.prefix_cache import (
    hidden_states,
    logits_of_calls,
    why_not_packed,
    why_not_shared,
)
from rollgym.trainer.backends.prefix_layout import SharedTokens
from rollgym.trainer.models.language_head import LanguageHead, own_logits, state_width
from rollgym.trainer.models.pictures import ImageTensors, tokens_or_embeddings

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
