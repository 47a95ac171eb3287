"""Thinking: what a reply opens with, apart from what it says. Every step is linear.

Thinking is what a reply opens with, between `<think>` and `</think>` (`<thinking>` and `<thought>` count the same, in
any case), or what precedes the first closing tag without an opening one: chat templates put the opening tag into the
prompt. Thinking that never closes was cut off, and nothing was said. Thinking may hold thinking, and mention its own
tags. Tags that stand elsewhere are text: in a fence of code, in quotation marks, between the tags of something else, in
a call of a tool, in the middle of what is said. So a program that prints `</think>` and an argument that holds
`<think>` stay whole.

Who knows the prompt need not guess: `split_thinking` takes whether the prompt has opened the thinking.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice

from rollgym.clients.replies.quoting import Quoting, may_quote_next

OPENING, CLOSING = "<think>", "</think>"
"""What chat templates and inference servers know as the tags around thinking."""
OPENINGS: tuple[str, ...] = ("<think>", "<thinking>", "<thought>")
"""All tags that open thinking; they count in any case."""
CLOSINGS: tuple[str, ...] = ("</think>", "</thinking>", "</thought>")
"""All tags that close it."""
LONGEST = 200_000
"""Of what was said outside thinking, so many characters are read, from the end."""

# The letters of tags are those of ASCII: in any case, `i` would also be the Turkish letter without a dot.
_TAG = re.compile(r"(?a:<(/?)(?:think|thinking|thought)>)", re.IGNORECASE)
_OPENS_WITH = re.compile(r"\s*+(?a:<(?:think|thinking|thought)>)", re.IGNORECASE)
_CLOSED = re.compile(r"(?a:</(?:think|thinking|thought)>)", re.IGNORECASE)
_MOST_TAGS = 500
"""So many tags are looked at, and the last one that closes; a reply with more repeats itself."""
_AHEAD = 100_000
"""So many characters behind the last of them are looked at for what closes a quotation."""
_WORD_BEFORE = re.compile(r"\S[ \t]{1,8}\Z")
_SENTENCE_GOES_ON = re.compile(r"[ \t]++\w|[.,;:!?)](?:\s|\Z)")


def strip_thinking(reply: str, longest: int = LONGEST) -> str:
    """Return what a reply says outside its thinking; the end of it if it is pages long.

    Args:
        reply: All of it.
        longest: How many characters are returned at most.
    """
    if not _may_hold_tags(reply):
        return reply[-longest:]
    reader = _Reader(reply)
    begin, opened = 0, _OPENS_WITH.match(reply)
    if opened is not None:
        begin = reader.behind_opened(opened.end())
    return reply[reader.behind_strays(begin, thought=opened is not None) :][-longest:]


def split_thinking(text: str, *, begun: bool) -> tuple[str | None, str]:
    """Return what a reply thinks, None if it does not, and what it says.

    Args:
        text: The reply.
        begun: Whether the prompt has opened the thinking already.
    """
    opened = _OPENS_WITH.match(text)
    if not begun and opened is None:
        return None, text
    begin = opened.end() if opened is not None else 0
    reader = _Reader(text)
    behind = reader.behind_opened(begin)
    # Thinking that was cut off was never said.
    thought, said = text[begin : reader.thought_until], text[behind:]
    return (thought if opened is not None else thought.lstrip()).strip("\n"), said.lstrip("\n")


def mentioned_tags(reply: str) -> list[re.Match[str]]:
    """Return the tags of thinking in a reply that are text: all but those around what it thinks."""
    tags = list(_TAG.finditer(reply)) if _may_hold_tags(reply) else []
    if not tags:
        return []
    opened = _OPENS_WITH.match(reply)
    begin = 0 if opened is None else opened.end()
    said = len(reply) - len(strip_thinking(reply, len(reply)))
    return [tag for tag in tags if tag.start() >= begin and not (tag[1] and tag.end() == said)]


def ends_thinking(thought: str) -> bool:
    """Whether a closing tag ends thinking, whatever follows it: nothing that was thought before it is open.

    Args:
        thought: All that stands between the opening tag and that closing tag.
    """
    return not (_may_hold_tags(thought) and _TAG.search(thought)) and not may_quote_next(thought.lstrip())


def opens_thinking(prompt: str) -> bool:
    """Whether a prompt ends with the opening of thinking, so that the reply begins within it."""
    return prompt.rstrip().endswith(OPENING)


def opens_with_thinking(text: str) -> re.Match[str] | None:
    """Return the tag with which a text opens, blanks aside, if it is one that opens thinking."""
    return _OPENS_WITH.match(text)


def first_closing(text: str) -> re.Match[str] | None:
    """Return the first tag of a text that closes thinking."""
    return _CLOSED.search(text) if _may_hold_tags(text) else None


def has_thought(reply: str) -> bool:
    """Whether a reply has thinking that came to its end; the opening tag may stand in the prompt."""
    return first_closing(reply) is not None and len(strip_thinking(reply, len(reply))) < len(reply)


def _may_hold_tags(text: str) -> bool:
    """Whether a tag of thinking can be in a text.

    Of a megabyte of `<` it takes a tenth of the time in which an expression tries each of them, and most replies hold
    no tag.
    """
    lowered = text.lower()
    return "think>" in lowered or "thinking>" in lowered or "thought>" in lowered


class _Reader:
    """Finds where thinking ends.

    Attributes:
        thought_until: Where the closing tag begins that was found last.
    """

    def __init__(self, reply: str) -> None:
        self.thought_until = len(reply)
        self._reply = reply
        self._tags = list(islice(_TAG.finditer(reply), _MOST_TAGS))
        # Quotations are looked for up to here; a tag behind it is taken for one that is not quoted.
        self._quoted_until = min(len(reply), self._tags[-1].end() + _AHEAD) if self._tags else 0
        if len(self._tags) == _MOST_TAGS and (last := _last_closing(reply, self._tags[-1].end())) is not None:
            self._tags.append(last)
        self._starts = [tag.start() for tag in self._tags]
        self._pairs: _Pairs | None = None
        self._is_first = True

    def behind_opened(self, begin: int) -> int:
        """Return where thinking ends that was opened before a place, and all that is opened right behind it."""
        while True:
            closing = self._closing(begin)
            self.thought_until = len(self._reply) if closing is None else closing.start()
            if closing is None:
                return len(self._reply)
            opened = _OPENS_WITH.match(self._reply, closing.end())
            if opened is None:
                return closing.end()
            begin = opened.end()

    def behind_strays(self, begin: int, *, thought: bool) -> int:
        """Return where thinking ends whose opening tag stands nowhere: behind closing tags that nothing has opened.

        Args:
            begin: From where on it is looked for.
            thought: Whether the reply has thought already. Closing tags that are words of a sentence are text then.
        """
        if bisect_left(self._starts, begin) == len(self._tags):
            return begin
        pairs = _Pairs(self._reply, begin, self._tags_from(begin), self._quoted_until, opened=False)
        self._pairs = pairs
        for tag in pairs.unopened:
            if tag.start() >= begin and not (thought and self._is_word(tag)):
                begin, thought = self._behind(tag), True
        return begin

    def _behind(self, tag: re.Match[str]) -> int:
        opened = _OPENS_WITH.match(self._reply, tag.end())
        return tag.end() if opened is None else self.behind_opened(opened.end())

    def _is_word(self, tag: re.Match[str]) -> bool:
        before = self._reply[max(0, tag.start() - 9) : tag.start()]
        return bool(_WORD_BEFORE.search(before) and _SENTENCE_GOES_ON.match(self._reply, tag.end()))

    def _tags_from(self, begin: int) -> Sequence[re.Match[str]]:
        return self._tags[bisect_left(self._starts, begin) :]

    def _closing(self, begin: int) -> re.Match[str] | None:
        """Return the tag that closes thinking which begins at a place; None if it was cut off."""
        index = bisect_left(self._starts, begin)
        if index == len(self._tags):
            return None
        tag = self._tags[index]
        if tag[1] and (index == len(self._tags) - 1 or self._ends_first(begin, tag)):
            return tag
        if self._pairs is None:
            self._pairs = _Pairs(self._reply, begin, self._tags[index:], self._quoted_until, opened=True)
        return self._pairs.closing(begin)

    def _ends_first(self, begin: int, tag: re.Match[str]) -> bool:
        """Whether a tag ends the first of what is thought; of what follows, many short pieces would be looked at."""
        first, self._is_first = self._is_first, False
        return first and ends_thinking(self._reply[begin : tag.start()])


class _Pairs:
    """Which tags close what, but for those that are quoted.

    Args:
        reply: All of it.
        begin: From where on it is read.
        tags: Those behind that place.
        quoted_until: Up to where quotations are looked for.
        opened: Whether thinking was opened right before it.

    Attributes:
        unopened: Closing tags that nothing has opened.
    """

    def __init__(
        self, reply: str, begin: int, tags: Sequence[re.Match[str]], quoted_until: int, *, opened: bool
    ) -> None:
        self.unopened: list[re.Match[str]] = []
        self._closings = [tag for tag in tags if tag[1]]
        self._plain: list[re.Match[str]] = []
        self._closed: dict[int, re.Match[str]] = {}
        open_at = [begin] if opened else []
        for tag in _unquoted(reply, begin, tags, quoted_until):
            if not tag[1]:
                open_at.append(tag.end())
                continue
            self._plain.append(tag)
            if open_at:
                self._closed[open_at.pop()] = tag
            else:
                self.unopened.append(tag)

    def closing(self, begin: int) -> re.Match[str] | None:
        """Return what closes thinking that begins at a place: its own tag, else the first one, else a quoted one."""
        return self._closed.get(begin) or _first(self._plain, begin) or _first(self._closings, begin)


def _last_closing(reply: str, begin: int) -> re.Match[str] | None:
    """Return the last tag behind a place that closes thinking, if it is among the last closing tags of any kind."""
    end = len(reply)
    for _ in range(_MOST_TAGS):
        end = reply.rfind("</", begin, end)
        if end < 0:
            return None
        if (tag := _TAG.match(reply, end)) is not None:
            return tag
    return None


def _unquoted(reply: str, begin: int, tags: Sequence[re.Match[str]], end: int) -> Iterator[re.Match[str]]:
    if not tags:
        return iter(())
    text = reply[begin:end].lstrip()
    shift = end - len(text)
    quoting = Quoting(text)
    return (tag for tag in tags if tag.start() >= end or not quoting.holds(tag.start() - shift))


def _first(tags: Sequence[re.Match[str]], begin: int) -> re.Match[str] | None:
    index = bisect_left(tags, begin, key=lambda tag: tag.start())
    return tags[index] if index < len(tags) else None
