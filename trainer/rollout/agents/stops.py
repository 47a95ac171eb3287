"""Texts that end a reply and are not part of it (`stop`): in a whole reply, and in one that is still being sampled."""

from collections.abc import Callable, Sequence

from rollgym.trainer.inference.base import GenerationResult


def stopped(
    result: GenerationResult,
    stops: Sequence[str],
    plain_text: Callable[[Sequence[int]], str],
    marked_text: Callable[[Sequence[int]], str],
) -> tuple[GenerationResult, str, str]:
    """Cut a reply at its first complete stop text; return it as text, without and with marks.

    Whether a text is complete depends on the tokens up to it alone, so what was sampled until then has the
    distribution of a reply that was stopped there; what was sampled after it is not part of the reply.

    Args:
        result: The sampled reply.
        stops: Texts that end a reply.
        plain_text: Makes text of ids, without special tokens.
        marked_text: Makes text of ids, with the marks of the model's family.
    """
    plain, marked = plain_text(result.token_ids), marked_text(result.token_ids)
    if not any(stop in plain for stop in stops):
        return result, plain, marked
    low, high = 0, len(result.token_ids)
    while high - low > 1:  # the first `low` tokens hold none of them, the first `high` do
        middle = (low + high) // 2
        text = plain_text(result.token_ids[:middle])
        low, high = (low, middle) if any(stop in text for stop in stops) else (middle, high)
    ended = GenerationResult(
        result.token_ids[:high], result.logprobs[:high], result.policy_versions[:high], "stop", result.experts
    )
    plain, marked = plain_text(ended.token_ids), marked_text(ended.token_ids)
    return ended, _cut(plain, stops), _cut(marked, stops)


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """Return the text that ends a reply first; None if the reply contains none of them."""
    found = [(index, stop) for stop in stops if (index := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def _cut(text: str, stops: Sequence[str]) -> str:
    indices = [text.find(stop) for stop in stops]
    return text[: min((index for index in indices if index >= 0), default=len(text))]


class PassingStops:
    """Lets text pass up to the first text that ends a reply, while that is sampled; see `stopped`.

    Args:
        stops: Texts that end a reply.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._waiting = ""
        self._ended = False

    def passed(self, text: str) -> str:
        """Add text, and return what is certainly part of the reply."""
        if not self._longest or self._ended:
            return "" if self._ended else text
        self._waiting += text
        indices = [index for stop in self._stops if (index := self._waiting.find(stop)) >= 0]
        self._ended = bool(indices)
        end = min(indices) if indices else max(0, len(self._waiting) - self._longest + 1)
        passed, self._waiting = self._waiting[:end], self._waiting[end:]
        return passed
