r"""Texts of a policy that repeats itself: one piece over and over, up to a megabyte.

Language models fall into such loops by themselves, and clients may be malicious. An environment that parses replies
with a backtracking pattern takes seconds for one of these texts, and blocks all sessions of its process meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator

TEXT_BYTES = 1_000_000
"""How long such a text is on the wire: a little under the largest request that servers take by default."""

SIZES = (1_000, 4_000, 16_000, 64_000, 256_000, TEXT_BYTES)
"""How much of each is tried, one after the other: quadratic cost shows before it takes minutes."""

LIMIT_S = 0.05
"""How long an environment may block its process, on a reset or on one of these texts."""

BEYOND_CHANCE_S = 0.25
"""A longer duration is not due to chance, and is not measured again."""

_CHARACTERS = "a0 \n\t<>[](){}`~\\\"'.,:;!?-+*/=$#|_^%é漢"
_TAGS = ("think", "answer", "action", "tool_call", "code", "search", "python")
# Calls in Python's syntax: the start, the repeated part of the argument, and the end.
_CALLS = (
    ("search(query='", "a", "')"),
    ("search(query=f'", "{1}", "')"),
    ("search(query=", "1<", "1)"),
    ("search(query=[", "1,", "+])"),
    ("search(query=", "\\'", ")"),
)

_MARKS = (
    *(
        "\\boxed{",
        "\\boxed{}",
        "\\boxed ",
        "```\n",
        "```python\n",
        "~~~\n",
        "``` a ",
        "\\(",
        "\\[",
        "$\n",
        "$x$ ",
    ),
    *('<tool_call>{"a', '<tool_call>{"a":"', "<tool_call><function=a>", "</function></tool_call>"),
    *("<function=", "<parameter=", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "</", "<t", "< "),
    *(
        '{"a":',
        "[[",
        "{'a':",
        '"a",',
        "{} ",
        "f(",
        "f(a=1)",
        "a.",
        "x=",
        "-1.5 ",
        "1,",
        "1,000",
        "1 ",
        "9" * 400 + " ",
        "\\'",
        '\\"',
    ),
    *(
        "click[",
        "search[a]",
        "up||",
        "(A)",
        "A. ",
        "(A) or ",
        "the ",
        "answer: ",
        "the answer is 1. ",
        "A:",
        "####",
    ),
    *(
        "e.g. ",
        "a... b ",
        "* a *",
        "***",
        "****** ",
        "- ",
        "[a]",
        "<<",
        ">>",
        "\\text{",
        "\\frac{",
        "^{",
        "10^",
    ),
)


def long_texts(size: int = TEXT_BYTES) -> Iterator[tuple[str, str]]:
    """Yield texts that are hard to read, each with a name for people.

    Args:
        size: Bytes of each as JSON writes it.
    """
    for character in _CHARACTERS:
        yield f"{character!r} over and over", _repeated(character, size)
    for tag in _TAGS:
        opening, closing = f"<{tag}>", f"</{tag}>"
        for piece in (opening, closing, opening + closing, closing + opening):
            yield f"{piece} over and over", _repeated(piece, size)
        yield f"{opening} around itself", _nested(opening, closing, size)
    for mark in _MARKS:
        yield f"{mark[:24]!r} over and over", _repeated(mark, size)
    for opening, closing in (("[", "]"), ("(", ")"), ("{", "}"), ("\\boxed{", "}"), ('{"a":', "}")):
        yield f"{opening} around itself", _nested(opening, closing, size)
    for begin, piece in (
        ("the", " "),
        ("option", " "),
        ("a\n", "\n"),
        ("answer", "\n"),
        ("final answer is", " "),
    ):
        yield (
            f"{begin!r}, and then {piece!r} over and over",
            begin + _repeated(piece, size - len(begin) - 2) + "!A:",
        )
    for begin, piece, end in _CALLS:
        room = size - _bytes(begin) - _bytes(end)
        yield f"a call with {piece!r} over and over", begin + _repeated(piece, room) + end


def _repeated(piece: str, size: int) -> str:
    return piece * (size // _bytes(piece))


def _nested(opening: str, closing: str, size: int) -> str:
    depth = size // (_bytes(opening) + _bytes(closing))
    return opening * depth + closing * depth


def _bytes(text: str) -> int:
    """How long a text is within JSON."""
    escaped = sum(text.count(character) for character in '"\\\n\t')
    return len(text.encode()) + escaped
