"""The program in a response: the last fenced block of its language, outside the think tags."""

import re
from dataclasses import dataclass

from rollgym.clients.replies.marks import fenced_blocks
from rollgym.clients.replies.thinking import strip_thinking
from rollgym.sandbox.core.base import Language

# Hardly any program has none of these, and most other texts that are short have none: they need no sandbox.
_PROGRAM = re.compile(r"\b(?:def|return|import|include|print|class|lambda|for|while|yield|pass)\b|[=(]")
_NAMES: dict[Language, frozenset[str]] = {
    "python": frozenset({"python", "py", "python3", "python2", "pypy", "pypy3"}),
    "bash": frozenset({"bash", "sh", "shell", "console", "zsh"}),
    "cpp": frozenset({"cpp", "c++", "cc", "cxx"}),
}


@dataclass(frozen=True, slots=True)
class Extracted:
    """A program as it stood in a response.

    Attributes:
        code: Its text.
        fenced: Whether it stood in a fence; otherwise it is the whole response.
    """

    code: str
    fenced: bool


def extract(response: str, language: Language) -> Extracted | None:
    """Return the program of a response.

    It is the last block that names the language, else the last that names none. A block that is never closed ends
    with the response. A response without any fence is a program as a whole, if it has anything of one; None if it has
    not, or has only blocks of other languages.
    """
    # Half a surrogate pair is not text that a program could be written in.
    text = strip_thinking(response).encode(errors="replace").decode()
    blocks = fenced_blocks(text)
    if not blocks:
        return Extracted(text, False) if _PROGRAM.search(text) else None
    for names in (_NAMES[language], frozenset({""})):
        mine = [code for name, code in blocks if name in names]
        if mine:
            return Extracted(mine[-1], True)
    return None
