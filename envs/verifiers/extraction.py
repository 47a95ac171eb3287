"""Where a response gives its answer: outside its thoughts, in one place only.

The places, in this order: a last sentence that confirms it, as few-shot prompts of the field teach ("The final answer
is ... I hope it is correct."), the last box, the last pair of answer tags, what follows the last "the answer is", and
where a verifier allows it, the last formula or number. A response that marks a place and leaves it empty has no
answer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rollgym.clients.replies import thinking
from rollgym.clients.replies.marks import ANSWER_WITHIN, Box, boxes, last_tagged
from rollgym.envs.verifiers.latex import UNITS

Place = Literal["box", "tag", "phrase", "whole", "formula", "number"]

_PHRASE = re.compile(
    r"\banswer\b\W{0,4}(?:is\b|are\b|[:：=])|####|答案(?:\s?[:：=]|是|为)",
    re.IGNORECASE | re.MULTILINE,
)
_SHORT_PHRASE = re.compile(r"^[^\S\n]*+(?:\*\*)?A:", re.MULTILINE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|[\n。]|,?\s(?:because|since|which)\b")
_PERCENT_SIGN = re.compile(r"\s*(?:\\?%|percent(?:age)?\b|pct\b)")
_ASKED = re.compile(r"[ \t]*+[^?\n\s](?:[^?.!\n]|\.(?=\d)){0,80}\?(?=\s|$)(?!\s*\Z)")
# "The answer is 5. Wait, it is 6.": what is taken back at once is not an answer. A run of blanks is looked at as a
# whole, and not again for each way of dividing it.
_TAKEN_BACK = re.compile(
    r"[ \t]*+(?:[^.?!\n]|\.(?=\d)){1,80}?(?:[.!]\s++|,\s*+|(?<!\s)\s++[–—-]++\s*+|\s\()"
    r"(?:wait|no(?=\s*[,.!:;–—]|\s+it\b)|actually|sorry|oops|scratch\s+that|correction|wrong|incorrect)\b",
    re.IGNORECASE,
)
_DENIED_BEHIND = re.compile(
    r"\W{0,4}(?:is\s+)?(?:wrong|incorrect|not\s+(?:right|correct|it))\b", re.IGNORECASE
)
_NEAR = 32
_LONGEST_SENTENCE = 2_000
_LONGEST_BETWEEN = 40
_BOX_OF_ONE = re.compile(r"\\(?:boxed|fbox)(-?\d[\d,]*(?:\.\d+)?)")
# Boxes with no more than this between them are one answer in parts: "\boxed{1} and \boxed{2}".
_BETWEEN_BOXES = re.compile(
    r"(?:[\s,;$.]|\\[,;! ]|\\quad|\\qquad|\\\(|\\\)|\\\[|\\\]|and|or|(?:\\text\{[\s,]*(?:and|or)[\s,]*\}))*"
)
_FORMULA = re.compile(
    r"\$\$(?P<display>[^$]+)\$\$|(?<!\\)\$(?P<inline>[^$\n]+)\$|\\\((?P<round>(?:(?!\\\()[^\n])*?)\\\)|\\\[(?P<square>(?:(?!\\\[).)*?)\\\]",
    re.DOTALL,
)
# TeX's inline formulas hold no line breaks beside their delimiters: what stands between is neither formula nor prose.
_BROKEN_FORMULA = re.compile(
    r"(?<![$\\])\$[ \t]*\n[^$]*\n[ \t]*\$(?!\$)|\\\([ \t]*\n(?:(?!\\\().)*?\\\)", re.DOTALL
)
# What stands before a number that is not an answer by itself: an operation, a list, a function, a denial, an equation.
_NOT_ALONE = re.compile(
    r"(?:[\w)}\]!]\s*[-+*/^·×÷−–<>≤≥≠]|[<>≤≥≠~]=?|!=|\d%?\s*,|\d%?,?\s+(?:or|and|to)"
    r"|\b(?:not|never|cannot)(?:\s+(?:be|equal))?|n't(?:\s+(?:be|equal))?|\b(?:sin|cos|tan|log|ln|exp|sqrt|mod)"
    r"|\\[a-z]+|(?:\d[a-z]\b|\b[b-z]\b\s*[-+*/^]|[-+*/^]\s*[b-z]\b)[^=\n]*=)\s*$"
    # A ratio or a time of day, but no label: "Step 2: 5".
    r"|\d:$",
    re.IGNORECASE,
)
_IN_LIST = re.compile(r"\d%?(?:\s*,|,?\s+(?:or|and|to))\s*$", re.IGNORECASE)
_CONFIRMED = re.compile(
    r"final answer is:?\s*(?P<answer>\S[^\n]{0,200}?)\.?\s{1,20}I hope it is correct", re.IGNORECASE
)
_NUMBER = re.compile(
    r"(?<![\w.,/^{}\\])[-+−]?[$€£]?"
    r"(?:\d{1,3}(?:[, \u00a0\u202f]\d{3})+(?!\d)(?:\.\d+)?|\d+(?:[.,]\d+)*|\.\d+)"
    r"(?:\s?/\s?\d++(?!\.\d))?"
    r"(?:\s?(?:\\?%|percent(?:age)?\b|pct\b))?"
    rf"(?![\d_^(]|\s*[<>≤≥≠]|(?=[a-zA-Z])(?!(?:{UNITS})\b|[a-zA-Z]+[²³]))"
)


@dataclass(frozen=True, slots=True)
class FoundAnswer:
    """An answer as it stands in a response.

    Attributes:
        place: The kind of place that it stood in.
        text: What stood there, without the marks.
        raw: The same with its marks, as a reader of LaTeX wants it.
        parts: How many boxes stand side by side in it.
    """

    place: Place
    text: str
    raw: str
    parts: int = 1


def without_thoughts(response: str) -> str:
    """Return what a response says outside its thoughts, as far as an answer is looked for in it."""
    return thinking.strip_thinking(response, ANSWER_WITHIN)


def marked_answer(text: str, *, short: bool = True) -> FoundAnswer | None:
    """Return the answer in the last box, else in the last answer tags, else after the last "answer is".

    Args:
        text: A response without its thoughts.
        short: Whether "A:" at the beginning of a line stands for "Answer:".

    Returns:
        What was found; its text is empty where the place is there and nothing stands in it. None without a place.
    """
    confirmed = _last(_CONFIRMED, text) if "hope" in text else None
    if confirmed is not None:
        # The box of a sentence that confirms it is the answer's mark, and no part of it.
        within = last_box(confirmed["answer"]) if "\\" in confirmed["answer"] else None
        return within if within is not None and within.text else _of_phrase(confirmed["answer"])
    box = last_box(text) if "\\" in text else None
    if box is not None:
        return box
    tag = last_tag(text)
    return tag if tag is not None else last_phrase(text, short=short)


def last_box(text: str) -> FoundAnswer | None:
    """Return the last box with balanced braces, together with those side by side with it."""
    found, opened = boxes(text)
    if "box" in text and _BOX_OF_ONE.search(text) is not None:
        # TeX takes one sign for the box where no brace opens; here it is the whole number that was meant.
        text = _BOX_OF_ONE.sub(r"\\boxed{\1}", text)
        found, opened = boxes(text)
    if not found:
        # A box that was opened and never closed: the response was cut off in its answer.
        return FoundAnswer("box", "", "") if opened else None
    by_depth: dict[int, list[Box]] = {}
    for box in found:
        by_depth.setdefault(box.depth, []).append(box)
    group = _side_by_side(text, by_depth[0])
    # A box within a box is the inner one's.
    while len(group) == 1:
        inner = [box for box in by_depth.get(group[0].depth + 1, ()) if box.start > group[0].start]
        if not inner:
            break
        group = _side_by_side(text, inner)
    if len({box.content.strip() for box in group}) == 1:
        # Said twice, it is one answer.
        group = group[-1:]
    said = ", ".join(box.content for box in group)
    return FoundAnswer("box", said.strip(), text[group[0].start : group[-1].end], len(group))


def _side_by_side(text: str, found: Sequence[Box]) -> list[Box]:
    """Return the last box, with those before it that belong to the same answer."""
    group = [found[-1]]
    for box in reversed(found[:-1]):
        between = text[box.end : group[-1].start]
        if len(between) > _LONGEST_BETWEEN or _BETWEEN_BOXES.fullmatch(between) is None:
            break
        group.append(box)
    return group[::-1]


def last_tag(text: str) -> FoundAnswer | None:
    """Return what stands in the last pair of answer tags."""
    said = last_tagged(text, "answer") if "<" in text else None
    return None if said is None else FoundAnswer("tag", said.strip(), said.strip())


def last_phrase(text: str, *, short: bool) -> FoundAnswer | None:
    """Return what follows the last "answer is", "Answer:" or "####" (or "A:"), up to the end of its sentence."""
    match = _last_stated(_PHRASE, text)
    if short and "A:" in text:
        match = _last(_SHORT_PHRASE, text, match.end() if match else 0) or match
    return None if match is None else _of_phrase(text[match.end() :])


def _last_stated(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last match; None if it is a question, or taken back: "The answer is 5? No, 6." gives None."""
    last = _last(pattern, text)
    if last is None or _ASKED.match(text, last.end()) or _TAKEN_BACK.match(text, last.end()):
        return None
    return last


def _of_phrase(rest: str) -> FoundAnswer:
    rest = rest.lstrip(' \t:：*\n"“')
    formula = _FORMULA.match(rest)
    if formula is not None:
        unit = _percent_after(rest, formula.end())
        return FoundAnswer("phrase", _formula_text(formula) + unit, formula[0] + unit)
    # A point within a number ends no sentence.
    end = _SENTENCE_END.search(rest)
    said = (rest[: end.start()] if end else rest).strip(' \t*_"“”')
    return FoundAnswer("phrase", said, said)


def numbers_in(text: str) -> list[str]:
    """Return the numbers that stand by themselves in a sentence; what is longer than one has none.

    Nor has a sentence with a list or a choice of numbers: `5 or 6 apples` is not 5.
    """
    if len(text) > _LONGEST_SENTENCE:
        return []
    if any(_IN_LIST.search(text[: match.start()][-_NEAR:]) for match in _NUMBER.finditer(text)):
        return []
    return [match[0].strip() for match in _NUMBER.finditer(text) if not _belongs_to_more(text, match)]


def _belongs_to_more(text: str, number: re.Match[str]) -> bool:
    return _NOT_ALONE.search(text[max(0, number.start() - _NEAR) : number.start()]) is not None


def last_formula_or_number(text: str) -> FoundAnswer | None:
    """Return the last formula or number of a response, whichever ends later."""
    text = _BROKEN_FORMULA.sub(" ", text) if "\n" in text else text
    formula = _last(_FORMULA, text) if "$" in text or "\\" in text else None
    number = _last(_NUMBER, text, 0 if formula is None else formula.end())
    if number is not None:
        if _belongs_to_more(text, number) or is_denied_behind(text, number.end()):
            return None
        said = number[0].strip()
        return FoundAnswer("number", said, said)
    if formula is None:
        return None
    unit = _percent_after(text, formula.end())
    return FoundAnswer("formula", _formula_text(formula).strip() + unit, formula[0] + unit)


def is_denied_behind(text: str, position: int) -> bool:
    """Whether what ends at a place is called wrong in the same breath: "5 (wrong)"."""
    return _DENIED_BEHIND.match(text, position) is not None


def _percent_after(text: str, position: int) -> str:
    match = _PERCENT_SIGN.match(text, position)
    return match[0] if match else ""


def _last(pattern: re.Pattern[str], text: str, start: int = 0) -> re.Match[str] | None:
    last = None
    for match in pattern.finditer(text, start):
        last = match
    return last


def _formula_text(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


def inside_dollars(text: str) -> str:
    """Return the formula that a text is, without its delimiters; the text itself if it is none."""
    match = _FORMULA.fullmatch(text.strip())
    return text.strip() if match is None else _formula_text(match)


def box_count(text: str) -> int:
    """Return how many boxes a text opens."""
    return boxes(text)[1]


def without_formulas(text: str) -> str:
    """Return what of a text is outside formulas."""
    return _FORMULA.sub(" ", text) if "$" in text or "\\" in text else text
