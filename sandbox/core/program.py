"""Programs as source text in a language; apart from back-ends, so that environments can name programs without one."""

from dataclasses import dataclass
from typing import Literal, get_args

Language = Literal["python", "bash", "cpp"]
LANGUAGES: tuple[Language, ...] = get_args(Language)


@dataclass(frozen=True, slots=True)
class Program:
    """A program as source text.

    Attributes:
        language: Its language; compiled languages are compiled inside the sandbox, too.
        source: The text of its one file.
        arguments: Words of its command line.
    """

    language: Language
    source: str
    arguments: tuple[str, ...] = ()
