"""What became of a test."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of one test.

    Attributes:
        passed: Whether it is passed.
        why: In a few words, if it is not.
        answer: What the program answered, as text, where there is something.
        unloadable: Whether the program could not even be loaded.
    """

    passed: bool
    why: str = ""
    answer: str = ""
    unloadable: bool = False
