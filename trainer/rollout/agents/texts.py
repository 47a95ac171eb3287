"""Prompts of plain text: what the policy said stands in them as the ids that it sampled.

A client of completions sends a text that continues an earlier prompt and its reply. The longest such beginning
stands for ids that are known, and the rest alone is tokenised.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from rollgym.trainer.core.errors import UnplayableTaskError
from rollgym.trainer.rollout.agents.errors import ApiError, invalid
from rollgym.trainer.rollout.rendering import ChatRenderer

_KEPT_CHARACTERS = 1 << 22


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt without a chat template.

    Attributes:
        ids: As the policy reads it.
        text: As the agent sent it, or would read it.
    """

    ids: list[int]
    text: str


class TextBook:
    """The texts of one episode whose ids are known: prompts with their replies.

    Args:
        renderer: The policy's tokenizer.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._ids: OrderedDict[str, list[int]] = OrderedDict()
        self._size = 0

    def prompt(self, asked: str | Sequence[int], param: str = "prompt") -> TextPrompt:
        """Return what the policy reads.

        Raises:
            ApiError: If the model does not know one of its ids, or the prompt is empty.
        """
        if not isinstance(asked, str):
            ids = list(asked)
            if max(ids) >= self._renderer.vocabulary:
                raise invalid(f"{param}: the model knows ids below {self._renderer.vocabulary}", param)
            return TextPrompt(ids, self._renderer.text(ids))
        noted = dict(self._ids)  # large prompts are read in threads
        known = max((each for each in noted if asked.startswith(each)), key=len, default="")
        try:
            rest = self._renderer.ids_of(asked[len(known) :]) if len(known) < len(asked) else []
        except UnplayableTaskError as error:
            raise ApiError(400, str(error), "invalid_value", param) from error
        ids = noted[known] + rest if known else self._opened(rest)
        return TextPrompt(ids, asked)

    def note(self, prompt: TextPrompt, reply: Sequence[int]) -> None:
        """Remember a reply and its prompt, unless the reply ended by itself: clients do not continue such a reply."""
        if not reply or reply[-1] in self._renderer.special_ids or reply[-1] in self._renderer.stop_token_ids:
            return
        text = prompt.text + self._renderer.text(reply)
        self._size += len(text) - (len(text) if text in self._ids else 0)
        self._ids[text] = [*prompt.ids, *reply]
        while self._size > _KEPT_CHARACTERS:
            self._size -= len(self._ids.popitem(last=False)[0])

    def _opened(self, ids: list[int]) -> list[int]:
        opening = self._renderer.opening_ids
        return ids if ids[: len(opening)] == opening else opening + ids
