"""Instructions about the form of a response: lists, sections, titles, JSON, marks.

None looks at a place more than a few times: a response of nothing but brackets or line breaks takes no longer than
others.
"""

import json
import re

from rollgym.envs.verifiers.instructions.text import Text

CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

_STAR_BULLET = re.compile(r"^[^\S\n]*+\*[^*].*$", re.MULTILINE)
_DASH_BULLET = re.compile(r"^[^\S\n]*+-.*$", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*[^\n*]*\*")
_STRONG = re.compile(r"\*\*[^\n*]*\*\*")
_FENCE_OPENINGS = ("```json", "```Json", "```JSON", "```")
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}


def placeholders(text: Text, num_placeholders: int) -> bool:
    """There are at least so many placeholders such as `[address]`."""
    return sum(map(_bracketed, text.raw.split("\n"))) >= num_placeholders


def postscript(text: Text, postscript_marker: str) -> bool:
    """There is a postscript."""
    marker = postscript_marker.strip()
    pattern = _POSTSCRIPTS.get(marker, re.escape(marker.lower()))
    return re.search(pattern, text.raw.lower()) is not None


def bullets(text: Text, num_bullets: int) -> bool:
    """There are exactly so many bullet points, of `*` or `-`."""
    return len(_STAR_BULLET.findall(text.raw)) + len(_DASH_BULLET.findall(text.raw)) == num_bullets


def constrained_response(text: Text) -> bool:
    """It has one of the three answers."""
    return any(choice in text.raw for choice in CHOICES)


def highlights(text: Text, num_highlights: int) -> bool:
    """At least so many sections are highlighted, by one asterisk or two."""
    single = sum(1 for found in _HIGHLIGHT.findall(text.raw) if found.strip("*").strip())
    double = sum(
        1 for found in _STRONG.findall(text.raw) if found.removeprefix("**").removesuffix("**").strip()
    )
    return single + double >= num_highlights


def sections(text: Text, section_spliter: str, num_sections: int) -> bool:
    """There are at least so many sections, each begun by the splitter and a number."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text.raw)) >= num_sections


def is_json(text: Text) -> bool:
    """All of it is JSON, fenced or not."""
    content = text.stripped
    for opening in _FENCE_OPENINGS:
        content = content.removeprefix(opening)
    try:
        json.loads(content.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: Text) -> bool:
    """There is a title such as `<<poem of joy>>`."""
    return any(map(_has_title, text.raw.split("\n")))


def hyphenated_sentences(text: Text) -> bool:
    """The sentences are connected by hyphens, with no spaces around them."""
    pieces = text.raw.split("-")
    return pieces == text.part(text.raw.replace("-", " ")).sentences


def square_brackets(text: Text) -> bool:
    """Every word stands in square brackets."""
    return all(piece.startswith("[") and piece.endswith("]") for piece in text.pieces)


def wrapped_bigrams(text: Text) -> bool:
    """Every pair of words stands in double angular brackets."""
    pairs = zip(text.pieces[::2], text.pieces[1::2], strict=False)
    return all(left.startswith("<<") and right.endswith(">>") for left, right in pairs)


def _bracketed(line: str) -> int:
    """Count what stands between a bracket and the next one that closes."""
    count, begin = 0, line.find("[")
    while begin >= 0 and (end := line.find("]", begin)) >= 0:
        count += 1
        begin = line.find("[", end)
    return count


def _has_title(line: str) -> bool:
    begin, end = line.find("<<"), line.rfind(">>")
    return 0 <= begin < end - 2 and bool(line[begin:end].lstrip("<").rstrip(">").strip())
