r"""What stands in the reply of a language model: all reading of replies begins here, and every step of it is linear.

A reply is read in this order, by games, tools, verifiers and adapters alike:

1. **Thinking is no reply.** Thinking is what a reply opens with, between `<think>` and `</think>` (`<thinking>` and
   `<thought>` count the same, in any case), or what precedes the first closing tag without an opening one: chat
   templates put the opening tag into the prompt. Thinking that never closes was cut off, and nothing was said. Tags
   that stand elsewhere are text: in a fence of code, in quotation marks, in a call of a tool, in the middle of what
   is said. So a program that prints `</think>` and an argument that holds `<think>` stay whole.
2. **A reply counts by its end.** Of what was said, the last `LONGEST` characters are read, and an answer is looked for
   in the last `ANSWER_WITHIN` of them.
3. Marks are found: pairs of tags, boxes, fences, sections of calls.

A policy that repeats itself writes a megabyte of open tags by itself, and an environment that runs inline reads it in
the server's event loop. So nothing here looks at a place more than a fixed number of times, whatever stands there.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

LONGEST = 200_000
"""Of what was said outside thinking, so many characters are read, from the end."""

ANSWER_WITHIN = 20_000
"""An answer, or an action, is looked for in so many characters at the end."""

MOST_SECTIONS = 1_000
"""No reply has more calls than this, nor a call more parameters."""

_TAG = re.compile(r"<(/?)(?:think|thinking|thought)>", re.IGNORECASE)
_OPENS_WITH = re.compile(r"\s*+<(?:think|thinking|thought)>", re.IGNORECASE)
_MOST_UNOPENED = 3
"""So many stretches of thinking without an opening tag are looked for: thinking may hold thinking."""
_MOST_QUOTED = 64
"""So many quoted tags are looked at."""
_LONGEST_QUOTED = 2_000
"""Characters of a line before a tag in which quotation marks are looked for."""
_QUOTATION = re.compile(r"(?<!\\)[\"']|(?<![`\\])`(?!`)")
_FENCE_LINE = re.compile(r"^[ ]{0,3}(`{3,}|~{3,})(.*)$", re.MULTILINE)
_CALL = re.compile(r"<(tool_calls?(?=>)|function(?==))[>=]")
_CLOSED = re.compile(r"</(?:think|thinking|thought)>", re.IGNORECASE)
# Possessive throughout: a run of marks is looked at once, and not again for each way of dividing it.
_FENCE = re.compile(r"[ ]{0,3}+(`{3,}+|~{3,}+)[ \t]*+([^\s`{]*+)[^`]*+")
_LINE_FENCE = re.compile(r"```(\w++)[ \t]++(?=[^ \t])")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)")
_BRACES = re.compile(
    r"(?P<box>\\(?:boxed|fbox|framebox)\s*+(?=\{))|(?P<bare>\\boxed\s++(?=[^\s{]))"
    r"|\\(?:[{}]|\\(?!boxed|fbox|framebox))|[{}]"
)
_PLAIN = r"\boxed{"
_BARE_CONTENT = re.compile(r"[^\s$.,]++(?:[.,]\d++)*")


# -- thinking ------------------------------------------------------------------------------------------------------


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
    for mark in itertools.islice(_CALL.finditer(text, begin), MOST_SECTIONS):
        closing = f"</{mark[1]}>"
        if mark.start() < behind or closing in missing:
            continue
        end = text.find(closing, mark.end())
        if end < 0:
            missing.add(closing)
        elif text[mark.end() : mark.end() + 64].lstrip().startswith(("{", "[", "<")) or mark[1] == "function":
            found.append((mark.start(), end))
            behind = end
    return found


def has_thought(reply: str) -> bool:
    """Whether a reply has thinking that came to its end; the opening tag may stand in the prompt."""
    return _CLOSED.search(reply) is not None


# -- tags ----------------------------------------------------------------------------------------------------------


def tagged(text: str, name: str) -> list[str]:
    """Return what stands in the pairs of a tag, in their order.

    A pair holds no opening tag of its own: of `<a>1<a>2</a>`, it is `2`.

    Args:
        text: What was said.
        name: Of the tag, in any case.
    """
    plain: list[str] = _plain_pair(name).findall(text)
    if 2 * len(plain) == text.count("<"):
        # No other mark is in it, as in most replies that games get.
        return plain
    found, begin = [], -1
    for tag in _tag(name).finditer(text):
        if tag[1]:
            if begin >= 0:
                found.append(text[begin : tag.start()])
            begin = -1
        else:
            begin = tag.end()
    return found


def last_tagged(text: str, name: str) -> str | None:
    """Return what stands in the last pair of a tag; None without a pair."""
    found = tagged(text, name)
    return found[-1] if found else None


@lru_cache(maxsize=64)
def _plain_pair(name: str) -> re.Pattern[str]:
    tag = re.escape(name)
    return re.compile(rf"<{tag}>([^<]*+)</{tag}>", re.IGNORECASE)


@lru_cache(maxsize=64)
def _tag(name: str) -> re.Pattern[str]:
    return re.compile(rf"<(/?){re.escape(name)}>", re.IGNORECASE)


# -- boxes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Box:
    r"""A `\boxed{...}` (or `\fbox`, `\framebox`, or `\boxed 5`) with balanced braces.

    Attributes:
        start: Where its command begins.
        end: Where it ends, its closing brace included.
        depth: In how many other boxes it stands.
    """

    start: int
    end: int
    depth: int
    _text: str
    _inside: tuple[int, int]

    @property
    def content(self) -> str:
        """What stands in it, without its braces."""
        # Cut out only where it is looked at: the contents of boxes within boxes are as long as all of them together.
        return self._text[slice(*self._inside)]


def boxes(text: str) -> tuple[list[Box], int]:
    """Return the boxes of a text in the order of their beginnings, and how many are opened in it.

    More are opened than returned where some never close: a reply that was cut off in its answer.
    """
    plain = _plain_box(text)
    return ([plain], 1) if plain is not None else _scanned_boxes(text)


def _plain_box(text: str) -> Box | None:
    """Return the one box of a text that has only one, with nothing in it that needs a closer look: most have."""
    begin = text.find(_PLAIN)
    if begin < 0 or text.count("box") > 1:
        return None
    end = text.find("}", begin)
    inside = begin + len(_PLAIN), end
    content = text[slice(*inside)]
    return None if end < 0 or "{" in content or "\\" in content else Box(begin, end + 1, 0, text, inside)


def _scanned_boxes(text: str) -> tuple[list[Box], int]:
    spans: list[tuple[int, int, int]] = []
    # Braces that are open: where each stands, and where its box begins, if it is one's.
    braces: list[tuple[int, int | None]] = []
    box, opened = None, 0
    first = _BOX.search(text)
    for mark in () if first is None else _BRACES.finditer(text, first.start()):
        if mark["box"]:
            box, opened = mark.start(), opened + 1
        elif mark["bare"]:
            opened += 1
            content = _BARE_CONTENT.match(text, mark.end())
            if content is not None:
                spans.append((mark.start(), mark.end(), content.end()))
        elif mark[0] == "{":
            braces.append((mark.start(), box))
            box = None
        elif mark[0] == "}" and braces:
            begin, of = braces.pop()
            if of is not None:
                spans.append((of, begin, mark.end()))
    return list(_nested(text, sorted(spans))), opened


def _nested(text: str, spans: list[tuple[int, int, int]]) -> Iterator[Box]:
    """Make boxes of spans that are sorted by their beginnings; they lie within each other or side by side."""
    around: list[int] = []
    for start, begin, end in spans:
        while around and around[-1] <= start:
            around.pop()
        inside = (begin + 1, end - 1) if text[begin] == "{" else (begin, end)
        yield Box(start, end, len(around), text, inside)
        around.append(end)


# -- fences --------------------------------------------------------------------------------------------------------


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Return the fenced blocks of a text, each with the name of its language in lower case.

    A block that is never closed ends with the text.
    """
    blocks: list[tuple[str, str]] = []
    mark, name = "", ""
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        fence = _FENCE.fullmatch(line.rstrip("\r\n")) if "```" in line or "~~~" in line else None
        if not mark:
            if fence:
                mark, name, lines = fence[1], fence[2].lower(), []
        elif fence and not fence[2] and fence[1].startswith(mark):
            blocks.append((name, "".join(lines)))
            mark = ""
        else:
            lines.append(line)
    if mark:
        blocks.append((name, "".join(lines)))
    return blocks


def fenced_lines(text: str) -> list[tuple[str, str]]:
    """Return the blocks that stand in one line each, as a person types them: three backticks, a name, text, three."""
    found = []
    for line in text.splitlines():
        line = line.rstrip(" \t")
        opened = _LINE_FENCE.match(line)
        if opened is not None and line.endswith("```") and len(line) - 3 > opened.end():
            found.append((opened[1], line[opened.end() : -3]))
    return found


def unfenced(text: str) -> str:
    """Return a text without the fence of a code block around all of it."""
    if not (text.startswith("```") and text.endswith("```") and "\n" in text):
        return text
    return text.partition("\n")[2].removesuffix("```").strip()


# -- sections ------------------------------------------------------------------------------------------------------


class Section(NamedTuple):
    """What stands between the two marks of a section.

    Attributes:
        body: Without the marks.
        closed: Whether it has its closing mark; without one it ends where the next section or the end of the text is.
    """

    body: str
    closed: bool


def sections(text: str, opening: str, closing: str) -> tuple[list[Section], str]:
    """Return the sections of a text, such as those between `<tool_call>` and `</tool_call>`, and what is in none.

    Args:
        text: What was said.
        opening: Mark before a section, as it is written.
        closing: Mark behind it.

    Returns:
        At most `MOST_SECTIONS`; the last of them ends with its closing mark, whatever is opened in it.
    """
    outside, *parts = text.split(opening, MOST_SECTIONS)
    found, rest = [], [outside]
    for part in parts:
        body, mark, behind = part.partition(closing)
        found.append(Section(body, bool(mark)))
        rest.append(behind)
    return found, "".join(rest)
