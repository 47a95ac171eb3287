"""Optimizer steps that are skipped because they would have destroyed the weights."""

from collections.abc import Callable

from rollgym.trainer.core.errors import RunError

LOSS = "the loss is not finite"


def gradient_named(weight: str | None) -> str:
    """Say that a gradient is not finite.

    Args:
        weight: Whose; None if each one is, and their norm is not.
    """
    return (
        "the gradient's norm is not finite" if weight is None else f"the gradient of {weight} is not finite"
    )


class SkippedSteps:
    """Counts optimizer steps, and ends the run if too many in a row are left out.

    Args:
        what: What is trained, for the message.
        limit: How many steps in a row may be left out.
        say: Prints a message to the user; called at the first step that is left out, then ever more rarely.
    """

    def __init__(self, what: str, limit: int, say: Callable[[str], None] = lambda text: None) -> None:
        self._what = what
        self._limit = limit
        self._say = say
        self._in_a_row = 0
        self._left_out = 0

    def note(self, *, applied: bool, why: str = "") -> None:
        """Take note of a step.

        Args:
            applied: Whether it was taken.
            why: What was wrong, if not.

        Raises:
            RunError: If it is one too many.
        """
        self._in_a_row = 0 if applied else self._in_a_row + 1
        if applied:
            return
        why = why or "the loss or its gradient is not finite"
        self._left_out += 1
        if self._left_out & (self._left_out - 1) == 0:
            so_far = "" if self._left_out == 1 else f" ({self._left_out} so far)"
            self._say(f"an optimizer step of the {self._what} was left out{so_far}: {why}")
        if self._in_a_row > self._limit:
            raise RunError(
                f"{self._in_a_row} optimizer steps of the {self._what} in a row were left out "
                f"(optimizer.max_skipped_steps {self._limit}): {why}; no weights were harmed: look at the rewards, or "
                "lower optimizer.learning_rate"
            )
