"""Streaming of replies: which part of a reply that is still being sampled can be sent already, and which text ends it.

Nothing is sent that could still change: bytes of an incomplete character, a possible beginning of a stop text
or of a tool call, blanks that a call would swallow. They follow at the end of the reply, so that the parts add up to
the reply as `read_reply` parses it.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Literal

from rollgym.clients.replies.formats.table import FORMATS
from rollgym.clients.replies.thinking import (
    CLOSINGS,
    OPENINGS,
    ends_thinking,
    first_closing,
    opens_with_thinking,
)
from rollgym.trainer.inference.base import GenerationResult
from rollgym.trainer.rollout.agents.replies import ParsedReply


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


_BROKEN = "\ufffd"
_PATIENCE = 8
"""Tokens that give no whole character, beyond which the next attempt waits for twice as many."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The next part of the stream.

    Attributes:
        kind: Whether it is thought or said.
        text: It.
    """

    kind: Literal["reasoning", "content"]
    text: str


class TextStream:
    """Tokens as text, whole characters at a time.

    Args:
        decode: Makes text of ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        # What is decoded begins one piece early: some tokens are written in another way at the beginning of a text.
        self._begin = self._read = 0
        self._next_attempt = 0

    def add(self, ids: Sequence[int]) -> str:
        """Add tokens, and return the text that is certain now."""
        self._ids += ids
        if len(self._ids) < self._next_attempt:
            return ""
        before = self._decode(self._ids[self._begin : self._read])
        now = self._decode(self._ids[self._begin :])
        if now.endswith(_BROKEN) or not now.startswith(before):
            waiting = len(self._ids) - self._read
            self._next_attempt = len(self._ids) + (waiting if waiting > _PATIENCE else 1)
            return ""
        self._begin, self._read = self._read, len(self._ids)
        return now[len(before) :]


class ReplyStream:
    """Takes a reply apart while it is sampled; see `read_reply`.

    Args:
        decode: Makes text of ids, without special tokens.
        special: Ids whose text may or may not be part of the reply; nothing behind one is sent before the end.
        stops: Texts that end the reply, and are not part of it.
        tool_format: The format of tool calls; None if calls are not parsed.
        begun: Whether the prompt has opened the thinking already.
        plain: Whether thinking is not parsed.
        held: Whether nothing is sent before the end.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        special: Container[int],
        stops: Sequence[str],
        tool_format: str | None,
        *,
        begun: bool,
        plain: bool = False,
        held: bool = False,
    ) -> None:
        self._text = TextStream(decode)
        self._special = special
        self._stops = PassingStops(stops)
        self._thinking = _Thinking(begun=begun)
        self._said = _Said(tool_format)
        self._plain = plain
        self._held = held
        self._given: dict[str, list[str]] = {"reasoning": [], "content": []}

    def add(self, ids: Sequence[int]) -> list[Delta]:
        """Add tokens, and return the part that can be sent now."""
        if self._held:
            return []
        plain = next((index for index, each in enumerate(ids) if each in self._special), len(ids))
        self._held = plain < len(ids)
        text = self._stops.passed(self._text.add(ids[:plain]))
        thought, said = ("", text) if self._plain else self._thinking.parted(text)
        deltas = []
        if thought or (self._thinking.thinks and not self._given["reasoning"]):
            deltas.append(Delta("reasoning", thought))
        if said := self._said.certain(said):
            deltas.append(Delta("content", said))
        for delta in deltas:
            self._given[delta.kind].append(delta.text)
        return deltas

    def end(self, reply: ParsedReply) -> list[Delta]:
        """Return what is left of a reply that has ended."""
        self._held = True
        deltas = []
        if reply.reasoning is not None:
            thought = _rest(reply.reasoning, self._given["reasoning"])
            if thought or not self._given["reasoning"]:
                deltas.append(Delta("reasoning", thought))
        if said := _rest(reply.content, self._given["content"]):
            deltas.append(Delta("content", said))
        return deltas


def _rest(whole: str, parts: Sequence[str]) -> str:
    given = "".join(parts)
    return whole[len(given) :] if whole.startswith(given) else ""


class _Thinking:
    """Parts what is thought from what is said.

    Attributes:
        thinks: Whether the reply is known to begin with its thinking.
    """

    def __init__(self, *, begun: bool) -> None:
        self.thinks = begun
        self._waiting = _Waiting()
        self._thoughts: list[str] = []
        # Held is what only the end of the reply can part: what was thought mentions its tags, or quotes.
        self._state: Literal["unknown", "opening", "thinking", "closed", "said", "held"] = (
            "opening" if begun else "unknown"
        )

    def parted(self, text: str) -> tuple[str, str]:
        """Return what of it is thought, and what is said."""
        if self._state == "said":
            return "", text
        if self._state == "held" or not self._waiting.add(text):
            return "", ""
        if self._state == "unknown" and not self._known():
            return "", ""
        thought = self._thought() if self._state in ("opening", "thinking") else ""
        if self._state == "closed":
            self._go_on()
        return thought, self._waiting.take_all() if self._is_said() else ""

    def _is_said(self) -> bool:
        return self._state == "said"

    def _known(self) -> bool:
        """Find out whether the reply begins with its thinking; False while that is open."""
        begin = self._waiting.text.lstrip()
        self.thinks = opens_with_thinking(begin) is not None
        if not self.thinks and _may_become(begin, OPENINGS):
            return False
        self._state = "opening" if self.thinks else "said"
        return True

    def _thought(self) -> str:
        if self._state == "opening" and not self._opened():
            return ""
        text = self._waiting.text
        closing = first_closing(text)
        if closing is None:
            thought = self._waiting.take(len(_before_partial_closing(text).rstrip("\n")))
        else:
            thought = text[: closing.start()]
            certain = ends_thinking("".join([*self._thoughts, thought]))
            self._state, self._waiting.text = ("closed" if certain else "held"), text[closing.end() :]
            thought = thought.rstrip("\n")
        self._thoughts.append(thought)
        return thought

    def _go_on(self) -> None:
        """Find out whether something is said behind what was thought, or thought again."""
        self._waiting.text = self._waiting.text.lstrip("\n")
        begin = self._waiting.text.lstrip()
        if opens_with_thinking(begin) is not None:
            self._state = "held"
        elif begin and not _may_become(begin, OPENINGS):
            self._state = "said"

    def _opened(self) -> bool:
        """Skip the opening; False while it may still continue."""
        begin = self._waiting.text.lstrip()
        opened = opens_with_thinking(begin)
        if opened is None and _may_become(begin, OPENINGS):
            return False
        begin = begin[0 if opened is None else opened.end() :].lstrip("\n")
        if not begin:
            return False
        self._state, self._waiting.text = "thinking", begin
        return True


class _Waiting:
    """Buffered text. Consecutive blanks are not processed one by one."""

    def __init__(self) -> None:
        self.text = ""
        self._blanks: list[str] = []

    def add(self, text: str) -> bool:
        """Append; False if that makes no new text available."""
        if not text or text.isspace():
            self._blanks.append(text)
            return False
        self.text = "".join([self.text, *self._blanks, text])
        self._blanks = []
        return True

    def take(self, end: int) -> str:
        """Remove and return the text before `end`."""
        taken, self.text = self.text[:end], self.text[end:]
        return taken

    def take_all(self) -> str:
        """Remove and return all remaining text."""
        return self.take(len(self.text))


class _Said:
    """Keeps back what may be a call of a tool, and the blanks before it."""

    def __init__(self, tool_format: str | None) -> None:
        self._mark = FORMATS[tool_format].mark if tool_format else ""
        self._bare = FORMATS[tool_format].bare if tool_format else ""
        self._waiting = _Waiting()
        self._begun = False
        self._held = False

    def certain(self, text: str) -> str:
        """Return the part that can be sent."""
        if not self._mark:
            return text
        if self._held or not self._waiting.add(text) or not (self._begun or self._begins()):
            return ""
        waiting = self._waiting.text
        index = waiting.find(self._mark)
        self._held = index >= 0
        certain = waiting[:index] if self._held else _before_partial(waiting, self._mark)
        return self._waiting.take(len(certain.rstrip()))

    def _begins(self) -> bool:
        """Find out whether the reply is nothing but a call; False if it may be, or is."""
        bare = _begins_with(self._waiting.text, self._bare) if self._bare else False
        self._held, self._begun = bare is True, bare is False
        return self._begun


def _begins_with(text: str, bare: str) -> bool | None:
    """Whether a text begins with these characters, with any blanks between them; None while that is open."""
    for character in bare:
        text = text.lstrip()
        if not text:
            return None
        if text[0] != character:
            return False
        text = text[1:]
    return True


def _may_become(text: str, tags: Sequence[str]) -> bool:
    """Whether a text is the beginning of a tag."""
    plain = text.lower()
    return any(tag.startswith(plain) for tag in tags)


def _before_partial_closing(text: str) -> str:
    """Return a text without an end that may be the beginning of a tag that closes thinking."""
    place = text.rfind("<", -max(map(len, CLOSINGS)))
    return text if place < 0 or not _may_become(text[place:], CLOSINGS) else text[:place]


def _before_partial(text: str, mark: str) -> str:
    """Return a text without an end that may be the beginning of a mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return text[:-length]
    return text
