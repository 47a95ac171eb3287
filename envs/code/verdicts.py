"""What became of a test."""

from dataclasses import dataclass

NOT_RUN = "not run, since another test had failed"
"""Why a test is not passed that was not needed any more."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of one test.

    Attributes:
        passed: Whether it is passed.
        why: In a few words, if it is not.
        answer: What the program answered, as text, where there is something.
        unloadable: Whether the program could not even be loaded.
        late: Whether it ran out of time.
    """

    passed: bool
    why: str = ""
    answer: str = ""
    unloadable: bool = False
    late: bool = False
