"""Where a text quotes: code, texts in quotation marks, calls, boxes. Every step is linear.

A tag of thinking that stands there is text. What is open at the end of a text may still turn out to quote what follows:
`may_quote_next` says so, for replies that are read as they come.
"""

import itertools
import re
from bisect import bisect_right
from collections.abc import Iterator

from rollgym.clients.replies.json_values import behind_blanks, json_end
from rollgym.clients.replies.marks import FenceLine, boxes

Span = tuple[int, int]

_MOST_MARKS = 1_000
"""So many marks of each kind are looked at; a reply with more repeats itself, and what follows is as it stands."""
_MOST_BACKTICKS = 2
"""Three are the fence of a block."""
_QUOTATION = re.compile(r"`+|[\"'“„«‘「]")
_PAIRS = {"“": "”", "„": "“”", "«": "»", "‘": "’", "「": "」"}
_REST_OF_DOUBLE = re.compile(rf'[^"\\\n]*+(?:\\.[^"\\\n]*+){{0,{_MOST_MARKS}}}"')
# Before a letter it is an apostrophe.
_REST_OF_SINGLE = re.compile(rf"[^'\\\n]*+(?:(?:\\.|'(?=\w))[^'\\\n]*+){{0,{_MOST_MARKS}}}'")
# What Python has before a text: r'', f'' and the like.
_TEXT_PREFIX = re.compile(r"(?:[rRbBfFuU]|[rR][bBfF]|[bBfF][rR])\Z")
# The derivative of a function looks like a formatted text.
_DERIVATIVE = re.compile(r"[fF]'+(?:\(|\s*+=)")
_TRIPLE = re.compile(r"\"\"\"|'''")
_FENCE = re.compile(r"`{3,}+|~{3,}+")
_FENCE_LINE = re.compile(FenceLine.PATTERN[1:], re.MULTILINE)
_ELEMENT = re.compile(r"<(/?)([A-Za-z_][\w.:-]{0,63}+)(?:\s[^<>\n]{0,500}+)?>")
_NO_ELEMENTS = frozenset({"think", "thinking", "thought", "tool_call", "tool_calls"})
_CALL = re.compile(r"<(tool_calls?(?=>)|function(?==))[>=]")
_XML_CLOSING = re.compile(r"</function>(?:\s*+</tool_call>)?")
_CLOSED = re.compile(r"</(?:think|thinking|thought)>", re.IGNORECASE)
_PROGRAM = re.compile(
    r"\s*+(?:#!|#include\b|import [\w.]|from [\w.]++ import |def \w++\(|class \w++[(:]|async def )"
)
_QUOTED_LINE = re.compile(r"[ \t]*+>")
_COMMENT = re.compile(r"#|//")


class Quoting:
    """The places of a text that are quoted.

    Args:
        text: What was said or thought.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        fences, left_open, _ = _fences(text)
        spans = [*fences, *_triples(text)[0], *_elements(text)[0], *_calls(text)]
        if "box" in text:
            spans += [(box.start, box.end) for box in boxes(text, _MOST_MARKS)[0]]
        bare = json_end(text, 0)
        if bare is not None:
            spans.append((0, bare))
        self._spans = _merged(spans)
        self._starts = [start for start, _ in self._spans]
        # A comment is one in code alone: in a text, the same mark begins a heading.
        program = _program(text)
        self._code = left_open if program is None else [(program, len(text))]
        self._code_starts = [start for start, _ in self._code]
        self._line_end = self._comment = -1
        self._marks_left = _MOST_MARKS
        self._quotations: list[Span] = []
        self._quotation_starts: list[int] = []

    def holds(self, start: int) -> bool:
        """Whether what begins at a place is quoted; the places that are asked for ascend."""
        if _within(self._spans, self._starts, start):
            return True
        if start >= self._line_end:
            self._look_at_line(start)
        if _within(self._quotations, self._quotation_starts, start):
            return True
        return self._comment <= start and _within(self._code, self._code_starts, start)

    def _look_at_line(self, place: int) -> None:
        begin = self._text.rfind("\n", 0, place) + 1
        end = self._text.find("\n", place)
        self._line_end = end if end >= 0 else len(self._text)
        self._quotations, _, seen = _quotations(self._text, begin, self._line_end, self._marks_left)
        self._marks_left -= seen
        self._quotation_starts = [start for start, _ in self._quotations]
        comment = _comment(self._text, begin, self._line_end)
        self._comment = len(self._text) if comment is None else comment


def _within(spans: list[Span], starts: list[int], place: int) -> bool:
    index = bisect_right(starts, place) - 1
    return index >= 0 and place < spans[index][1]


def may_quote_next(text: str) -> bool:
    """Whether what follows a text may be quoted: something is open in it."""
    line = text.rfind("\n") + 1
    return (
        _CALL.search(text) is not None
        or _fences(text)[2]
        or _triples(text)[1]
        or _elements(text)[1]
        or ("box" in text and _open_boxes(text))
        or _quotations(text, line, len(text), _MOST_MARKS)[1]
        or (_PROGRAM.match(text) is not None and _comment(text, line, len(text)) is not None)
        or text.lstrip().startswith(("{", "["))
    )


def _comment(text: str, begin: int, end: int) -> int | None:
    """Return behind what a comment begins in a line; the mark of a quotation is none of the code in it either."""
    found = _QUOTED_LINE.match(text, begin, end) or _COMMENT.search(text, begin, end)
    return None if found is None else found.end()


def _open_boxes(text: str) -> bool:
    found, opened = boxes(text, _MOST_MARKS)
    return opened > len(found)


def _program(text: str) -> int | None:
    """Return where a program begins that is not in a fence: with the text, or behind thinking."""
    begins = (0, *(tag.end() for tag in _first_of(_CLOSED.finditer(text))))
    return next((begin for begin in begins if _PROGRAM.match(text, begin)), None)


def _first_of(marks: Iterator[re.Match[str]]) -> Iterator[re.Match[str]]:
    return itertools.islice(marks, _MOST_MARKS)


def _merged(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


# -- fences --------------------------------------------------------------------------------------------------------


def _fences(text: str) -> tuple[list[Span], list[Span], bool]:
    """Return the fenced blocks that are closed, those that are not, and whether the last one is open.

    A block in which another one begins was left open.
    """
    if "```" not in text and "~~~" not in text:
        return [], [], False
    closed: list[Span] = []
    left_open: list[Span] = []
    opening, start, loose = None, 0, -1
    for line in _fence_lines(text):
        fence = FenceLine.of(line)
        if opening is not None and fence.may_close(opening):
            if not fence.rest or _CLOSED.match(fence.rest):
                closed.append((start, line.end("mark")))
                opening = None
                continue
            loose = line.start() if loose < 0 else loose
        if fence.opens and (opening is None or fence.name):
            if opening is not None:
                left_open.append((start, line.start() if loose < 0 else loose))
            opening, start, loose = fence, line.start(), -1
    if opening is not None:
        left_open.append((start, len(text) if loose < 0 else loose))
    return closed, left_open, opening is not None


def _fence_lines(text: str) -> Iterator[re.Match[str]]:
    """Yield the lines that may open or close a block; thinking may end right before one."""
    begin = looked = 0
    for mark in _first_of(_FENCE.finditer(text)):
        if mark.start() < looked:
            continue
        begin = text.rfind("\n", looked, mark.start()) + 1 or begin
        closed = text.rfind("</", max(begin, looked), mark.start())
        tag = _CLOSED.match(text, closed) if closed >= 0 else None
        line = _FENCE_LINE.match(text, begin if tag is None else tag.end())
        looked = mark.end()
        if line is not None:
            looked = line.end()
            yield line


# -- texts in quotation marks --------------------------------------------------------------------------------------


def _triples(text: str) -> tuple[list[Span], bool]:
    """Return the texts of several lines that Python has, and whether one is open at the end."""
    found, mark, start = [], "", 0
    for each in _first_of(_TRIPLE.finditer(text)):
        if not mark:
            mark, start = each[0], each.start()
        elif mark == each[0]:
            found.append((start, each.end()))
            mark = ""
    return found, bool(mark)


def _quotations(text: str, begin: int, end: int, most: int) -> tuple[list[Span], bool, int]:
    """Return what stands in quotation marks in a line, whether one of them has no other, and how many it has.

    Args:
        text: Where the line stands.
        begin: Its first place.
        end: The place behind it.
        most: How many marks are looked at.
    """
    found: list[Span] = []
    missing: set[str] = set()  # Each closing mark is looked for to the end of the line once only.
    position, seen = begin, 0
    while seen < most and (mark := _QUOTATION.search(text, position, end)) is not None:
        position, seen = mark.end(), seen + 1
        if mark[0] in missing or len(mark[0]) > _MOST_BACKTICKS or not _opens(text, mark.start(), begin):
            continue
        closed = _behind_closing(text, mark, end)
        if closed is None:
            missing.add(mark[0])
        else:
            found.append((mark.start(), closed))
            position = closed
    return found, bool(missing), seen


def _opens(text: str, place: int, line: int) -> bool:
    """Whether a quotation mark can open; one behind a letter is an apostrophe, but where Python has r''."""
    if place == line:
        return True
    before = text[place - 1]
    if before == "\\":
        return False
    if text[place] != "'" or not before.isalnum():
        return True
    word = place
    while word > line and place - word < 3 and (text[word - 1].isalnum() or text[word - 1] == "_"):
        word -= 1
    prefix = _TEXT_PREFIX.match(text, word, place)
    return prefix is not None and _DERIVATIVE.match(text, word) is None


def _behind_closing(text: str, opening: re.Match[str], end: int) -> int | None:
    mark, begin = opening[0], opening.end()
    if mark[0] == "`":
        closing = re.compile(rf"(?<!`)`{{{len(mark)}}}(?!`)").search(text, begin, end)
    elif mark in _PAIRS:
        closing = re.compile(f"[{_PAIRS[mark]}]").search(text, begin, end)
    else:
        closing = (_REST_OF_DOUBLE if mark == '"' else _REST_OF_SINGLE).match(text, begin, end)
    return None if closing is None else closing.end()


# -- elements and calls --------------------------------------------------------------------------------------------


def _elements(text: str) -> tuple[list[Span], bool]:
    """Return the pairs of tags, and whether one is open; a pair holds no opening tag of its own."""
    found: list[Span] = []
    opened: dict[str, int] = {}
    for tag in _first_of(_ELEMENT.finditer(text)):
        if tag[2].lower() in _NO_ELEMENTS:
            continue
        if not tag[1]:
            opened[tag[2]] = tag.start()
        elif (start := opened.pop(tag[2], None)) is not None:
            found.append((start, tag.end()))
    return found, bool(opened)


def _calls(text: str) -> Iterator[Span]:
    """Return where calls stand that are closed; in those of other formats texts have quotation marks."""
    behind = 0
    missing: set[str] = set()  # Each closing mark is looked for to the end of the text once only.
    for mark in _first_of(_CALL.finditer(text)):
        closing = f"</{mark[1]}>"
        if mark.start() < behind or closing in missing:
            continue
        end = text.find(closing, mark.end())
        if end < 0:
            missing.add(closing)
        elif text[mark.end() : mark.end() + 64].lstrip().startswith(("{", "[", "<")) or mark[1] == "function":
            behind = _call_end(text, mark, end)
            yield mark.start(), behind


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
