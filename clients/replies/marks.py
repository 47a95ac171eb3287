r"""Marks in what a reply says: pairs of tags, boxes, fences of code. Every step is linear.

A policy that repeats itself writes a megabyte of open tags by itself, and an environment that runs inline reads it in
the server's event loop. So nothing here looks at a place more than a fixed number of times, whatever stands there.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import ClassVar

ANSWER_WITHIN = 20_000
"""An answer, or an action, is looked for in so many characters at the end."""

# Possessive throughout: a run of marks is looked at once, and not again for each way of dividing it.
_IN_QUOTE = re.compile(r"[ \t]*+>[ ]?")
# Texts of one line, comments, and the marks of texts of several lines, in Python.
_TEXTS = re.compile(r"\"\"\"|'''|\"[^\"\\]*+(?:\\.[^\"\\]*+)*\"?|'[^'\\]*+(?:\\.[^'\\]*+)*'?|#.*+")
_MOST_TEXTS = 2_000
_LINE_FENCE = re.compile(r"```(\w++)[ \t]++(?=[^ \t])")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)")
_BRACES = re.compile(
    r"(?P<box>\\(?:boxed|fbox|framebox)\s*+(?=\{))|(?P<bare>\\boxed\s++(?=[^\s{]))"
    r"|\\(?:[{}]|\\(?!boxed|fbox|framebox))|[{}]"
)
_PLAIN = r"\boxed{"
_BARE_CONTENT = re.compile(r"[^\s$.,]++(?:[.,]\d++)*")


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
        end: Its end, behind its closing brace.
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
        # Cut out only when asked for: the contents of boxes within boxes are as long as all of them together.
        return self._text[slice(*self._inside)]


def boxes(text: str, most: int | None = None) -> tuple[list[Box], int]:
    """Return the boxes of a text in the order of their beginnings, and how many are opened in it.

    More are opened than returned where some never close: a reply that was cut off in its answer.

    Args:
        text: What was said.
        most: How many boxes and braces are looked at; None for all.
    """
    plain = _plain_box(text)
    return ([plain], 1) if plain is not None else _scanned_boxes(text, most)


def _plain_box(text: str) -> Box | None:
    """Return the one box of a text that has only one, with nothing in it that needs a closer look: most have."""
    begin = text.find(_PLAIN)
    if begin < 0 or text.count("box") > 1:
        return None
    end = text.find("}", begin)
    inside = begin + len(_PLAIN), end
    content = text[slice(*inside)]
    return None if end < 0 or "{" in content or "\\" in content else Box(begin, end + 1, 0, text, inside)


def _scanned_boxes(text: str, most: int | None) -> tuple[list[Box], int]:
    spans: list[tuple[int, int, int]] = []
    # Braces that are open: where each stands, and where its box begins, if it is one's.
    braces: list[tuple[int, int | None]] = []
    box, opened = None, 0
    first = _BOX.search(text)
    for mark in () if first is None else islice(_BRACES.finditer(text, first.start()), most):
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


@dataclass(frozen=True, slots=True)
class FenceLine:
    """A line that opens or closes a fenced block, as it may stand in lists and in quotations.

    Attributes:
        before: Blanks, marks of lists (`-`, `1.`) and of quotations (`>`) before the fence.
        mark: Its backticks or tildes.
        rest: What stands behind it.
    """

    PATTERN: ClassVar[str] = (
        r"^(?P<before>(?:[ \t>]++|[-*+](?=[ \t])|\d{1,9}+[.)](?=[ \t])){0,40})(?P<mark>`{3,}+|~{3,}+)(?P<rest>.*+)$"
    )
    before: str
    mark: str
    rest: str

    @classmethod
    def of(cls, line: re.Match[str]) -> "FenceLine":
        """Return what was found."""
        return cls(line["before"], line["mark"], line["rest"].strip())

    @property
    def opens(self) -> bool:
        """Whether a block may begin with it."""
        return "`" not in self.rest

    @property
    def name(self) -> str:
        """The language that it names, in lower case."""
        found = _NAME.match(self.rest)
        return found[0].lower() if found else ""

    def may_close(self, opening: "FenceLine") -> bool:
        """Whether its mark can close a block; one that stands far to the right of it is a part of it."""
        if not (self.before or opening.before):
            return self.mark.startswith(opening.mark)
        return (
            self.mark.startswith(opening.mark)
            and not self.before.strip(" \t>")
            and self.before.count(">") == opening.before.count(">")
            and len(self.before) <= len(opening.before) + 3
        )

    def without_margin(self, line: str) -> str:
        """Return a line of a block without what stands before the block itself."""
        if not self.before:
            return line
        for _ in range(self.before.count(">")):
            line = _IN_QUOTE.sub("", line, count=1)
        margin = 0 if ">" in self.before else len(self.before)
        blanks = len(line) - len(line.lstrip(" \t"))
        return line[min(margin, blanks) :]


_NAME = re.compile(r"[^\s`{]++")
_FENCE = re.compile(FenceLine.PATTERN)
_PYTHON = frozenset({"python", "py", "python3", "python2", "pypy", "pypy3"})


@lru_cache(maxsize=16)
def _fence_line(line: str) -> FenceLine | None:
    """Return what a line is; nearly all of them are alike."""
    found = _FENCE.match(line)
    return None if found is None else FenceLine.of(found)


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Return the fenced blocks of a text, each with the name of its language in lower case.

    A block that is never closed ends with the text. A fence in a text of several lines of Python is a part of it.
    """
    lines = text.splitlines(keepends=True)
    blocks, open_text = _blocks(lines, texts=True)
    # A text that never closes was none.
    return _blocks(lines, texts=False)[0] if open_text else blocks


def _blocks(lines: Sequence[str], *, texts: bool) -> tuple[list[tuple[str, str]], bool]:
    """Return the blocks, and whether a text of several lines held back the end of one, and never closed."""
    blocks: list[tuple[str, str]] = []
    opening: FenceLine | None = None
    inside: list[str] = []
    mark, held = "", False
    for line in lines:
        fence = _fence_line(line.rstrip("\r\n")) if "```" in line or "~~~" in line else None
        if opening is None:
            if fence is not None and fence.opens:
                opening, inside, mark = fence, [], ""
        elif fence is not None and not fence.rest and fence.may_close(opening) and not mark:
            blocks.append((opening.name, "".join(inside)))
            opening = None
        else:
            held = held or (bool(mark) and fence is not None)
            inside.append(opening.without_margin(line))
            if texts and opening.name in _PYTHON:
                mark = _open_text(line, mark)
    if opening is not None:
        blocks.append((opening.name, "".join(inside)))
    return blocks, opening is not None and bool(mark) and held


def _open_text(line: str, mark: str) -> str:
    """Return the mark of the text of several lines that is open behind a line of Python, given that before it."""
    if not mark and '"""' not in line and "'''" not in line:
        return ""
    position = 0
    for _ in range(_MOST_TEXTS):
        if mark:
            end = line.find(mark, position)
            if end < 0:
                return mark
            position, mark = end + len(mark), ""
        found = _TEXTS.search(line, position)
        if found is None:
            return ""
        position = found.end()
        if found[0] in ('"""', "'''"):
            mark = found[0]
    # A line with more repeats itself.
    return ""


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
