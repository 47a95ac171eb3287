"""Thinking: what a reply opens with, apart from what it says. Every step is linear.

Thinking is what a reply opens with, between `<think>` and `</think>` (`<thinking>` and `<thought>` count the same, in
any case), or what precedes the first closing tag without an opening one: chat templates put the opening tag into the
prompt. Thinking that never closes was cut off, and nothing was said. Tags that stand elsewhere are text: in a fence of
code, in quotation marks, in a call of a tool, in the middle of what is said. So a program that prints `</think>` and an
argument that holds `<think>` stay whole.

Who knows the prompt need not guess: `split_thinking` is told whether the prompt has opened the thinking.
"""

import itertools
import re

from rollgym.clients.replies.json_values import behind_blanks, json_end

OPENING, CLOSING = "<think>", "</think>"
"""What chat templates and inference servers know as the tags around thinking."""
LONGEST = 200_000
"""Of what was said outside thinking, so many characters are read, from the end."""

_TAG = re.compile(r"<(/?)(?:think|thinking|thought)>", re.IGNORECASE)
_OPENS_WITH = re.compile(r"\s*+<(?:think|thinking|thought)>", re.IGNORECASE)
_MOST_UNOPENED = 3
"""So many stretches of thinking without an opening tag are looked for: thinking may hold thinking."""
_MOST_QUOTED = 64
"""So many quoted tags are looked at."""
_LONGEST_QUOTED = 2_000
"""Characters of a line before a tag in which quotation marks are looked for."""
_MOST_CALLS = 1_000
_QUOTATION = re.compile(r"(?<!\\)[\"']|(?<![`\\])`(?!`)")
_FENCE_LINE = re.compile(r"^[ ]{0,3}(`{3,}|~{3,})(.*)$", re.MULTILINE)
_CALL = re.compile(r"<(tool_calls?(?=>)|function(?==))[>=]")
_XML_CLOSING = re.compile(r"</function>(?:\s*+</tool_call>)?")
_CLOSED = re.compile(r"</(?:think|thinking|thought)>", re.IGNORECASE)


def strip_thinking(reply: str, longest: int = LONGEST) -> str:
    """Return what a reply says outside its thinking; of what goes on for pages, the end.

    Args:
        reply: All of it.
        longest: How many characters are returned at most.
    """
    if "<" not in reply or _TAG.search(reply) is None:
        return reply[-longest:]
    begin = _behind_opened(reply, 0)
    for _ in range(_MOST_UNOPENED):
        end = _behind_unopened(reply, begin)
        if end is None:
            break
        begin = _behind_opened(reply, end)
    return reply[begin:][-longest:]


def _behind_opened(reply: str, begin: int) -> int:
    """Return where the thinking ends that a reply opens with."""
    while (opened := _OPENS_WITH.match(reply, begin)) is not None:
        closed = _CLOSED.search(reply, opened.end())
        begin = len(reply) if closed is None else closed.end()
    return begin


def _behind_unopened(reply: str, begin: int) -> int | None:
    """Return where thinking ends whose opening tag stands in the prompt: behind the first tag that is not quoted."""
    quoting: _Quoting | None = None
    for tag in itertools.islice(_TAG.finditer(reply, begin), _MOST_QUOTED):
        quoting = quoting or _Quoting(reply, begin)
        if not quoting.holds(tag.start(), tag.end()):
            return tag.end() if tag[1] else None
    return None


class _Quoting:
    """Where a text quotes: fences of code, texts in quotation marks, and calls.

    Args:
        text: What was said.
        begin: Where to begin.
    """

    def __init__(self, text: str, begin: int) -> None:
        self._text = text
        self._fences = _fences(text, begin)
        self._calls = _calls(text, begin)

    def holds(self, start: int, end: int) -> bool:
        """Whether a tag is quoted."""
        for first, last in (*self._fences, *self._calls):
            if first <= start < last:
                return True
        return self._in_quotation_marks(start, end)

    def _in_quotation_marks(self, start: int, end: int) -> bool:
        line = self._text.rfind("\n", 0, start) + 1
        before = self._text[max(line, start - _LONGEST_QUOTED) : start]
        mark = ""
        for found in _QUOTATION.finditer(before):
            if not mark and not before[found.start() - 1 : found.start()].isalnum():
                mark = found[0]  # one behind a letter is an apostrophe
            elif mark == found[0]:
                mark = ""
        stop = self._text.find("\n", end)
        behind = self._text[end : min(stop if stop >= 0 else len(self._text), end + _LONGEST_QUOTED)]
        return bool(mark) and len(mark) == 1 and mark in behind


def _fences(text: str, begin: int) -> list[tuple[int, int]]:
    """Return where fenced blocks of code stand that are closed."""
    if "```" not in text and "~~~" not in text:
        return []
    found, mark, start = [], "", begin
    for line in _FENCE_LINE.finditer(text, begin):
        rest = line[2].strip()
        if not mark:
            if "`" not in rest:
                mark, start = line[1], line.start()
        elif line[1].startswith(mark) and (not rest or _CLOSED.match(rest)):
            found.append((start, line.end(1)))
            mark = ""
    return found


def _calls(text: str, begin: int) -> list[tuple[int, int]]:
    """Return where calls stand that are closed; in those of other formats texts have quotation marks."""
    found, behind = [], begin
    missing: set[str] = set()  # Each closing mark is looked for to the end of the text once only.
    for mark in itertools.islice(_CALL.finditer(text, begin), _MOST_CALLS):
        closing = f"</{mark[1]}>"
        if mark.start() < behind or closing in missing:
            continue
        end = text.find(closing, mark.end())
        if end < 0:
            missing.add(closing)
        elif text[mark.end() : mark.end() + 64].lstrip().startswith(("{", "[", "<")) or mark[1] == "function":
            behind = _call_end(text, mark, end)
            found.append((mark.start(), behind))
    return found


def _call_end(text: str, opening: re.Match[str], first: int) -> int:
    """Return where a call ends whose texts may hold its closing mark; `first` is the first of them."""
    begin = opening.end()
    end = json_end(text, begin)
    if end is not None and text.startswith(f"</{opening[1]}>", behind_blanks(text, end)):
        return end
    # What comes behind the next call is none of this one's.
    following = text.find(opening[0], begin)
    ends = _XML_CLOSING.finditer(text, begin, following if following >= 0 else len(text))
    return max((mark.end() for mark in ends), default=first)


def split_thinking(text: str, *, begun: bool) -> tuple[str | None, str]:
    """Return what a reply thinks, None where it does not, and what it says; as inference servers part them.

    Args:
        text: The reply.
        begun: Whether the prompt has opened the thinking already.
    """
    if not begun and not text.lstrip().startswith(OPENING):
        return None, text
    thought, closed, said = text.partition(CLOSING)
    thought = thought.lstrip().removeprefix(OPENING).strip("\n")
    # Thinking that was cut off was never said.
    return thought, (said.lstrip("\n") if closed else "")


def opens_thinking(prompt: str) -> bool:
    """Whether a prompt ends with the opening of thinking, so that the reply begins within it."""
    return prompt.rstrip().endswith(OPENING)


def has_thought(reply: str) -> bool:
    """Whether a reply has thinking that came to its end; the opening tag may stand in the prompt."""
    return _CLOSED.search(reply) is not None
