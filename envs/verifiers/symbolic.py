"""Comparisons that need a computer algebra system: Math-Verify's, in a process of its own and under a clock."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from rollgym.envs.verifiers.affordable import never_worked_out, too_much
from rollgym.envs.verifiers.pool import CallFailed, CallTimeout, NoProcess, PoolShare

_CALL = "rollgym.envs.verifiers.math_verify_call:compare"
_PLAIN_ANSWER = "$1$"
_KEPT = 1024

Judgement = Literal[
    "equal",
    "different",
    "unreadable_answer",
    "unreadable_reference",
    "comparison_timeout",
    "comparison_failed",
]
"""What came of a comparison; the last three say nothing about the answer."""


class Symbolic(NamedTuple):
    """A judgement, and why."""

    judgement: Judgement
    why: str = ""


class SymbolicComparison:
    """Has Math-Verify compare answers with references.

    An answer is never the reason that nothing is known: what is too large to be read is not read, and where a
    comparison takes too long, or breaks the process that makes it, while the reference alone is read in time, the
    answer is what could not be read.

    Args:
        processes: Comparisons that may run at a time.
        timeout_s: Wall clock of one of them.
    """

    def __init__(self, processes: int, timeout_s: float) -> None:
        self._share = PoolShare(_CALL, processes)
        self._timeout_s = timeout_s
        self._known: dict[tuple[str, str], Symbolic] = {}

    def compare(self, gold: str, answers: Mapping[str, str], options: Mapping[str, Any]) -> Symbolic:
        """Compare an answer with its reference.

        Args:
            gold: The reference.
            answers: The answer in forms of which the first that is not too much is read: each with what of it a policy
                may have made too large.
            options: Math-Verify's.
        """
        try:
            return self._compared(gold, answers, options)
        except NoProcess as missing:
            return Symbolic("comparison_failed", str(missing))

    def pids(self) -> list[int]:
        """Return the processes that are there."""
        return self._share.pool.pids()

    def close(self) -> None:
        """Give the processes back."""
        self._share.close()

    def _compared(self, gold: str, answers: Mapping[str, str], options: Mapping[str, Any]) -> Symbolic:
        if (large := never_worked_out(gold)) is not None:
            return Symbolic("unreadable_reference", large)
        refused = ""
        for text, sent in answers.items():
            reason = too_much(text, gold)
            if reason is None:
                return self._asked(gold, sent, options)
            refused = reason
        alone = self._reference_alone(gold, options)
        return Symbolic("unreadable_answer", refused) if alone.judgement == "equal" else alone

    def _asked(self, gold: str, answer: str, options: Mapping[str, Any]) -> Symbolic:
        try:
            found = self._share.pool.call({"gold": gold, "answer": answer, **options}, self._timeout_s)
        except NoProcess:
            raise
        except (CallTimeout, CallFailed) as failure:
            alone = self._reference_alone(gold, options)
            if alone.judgement != "equal":
                return alone
            why = f"Math-Verify gave {failure}" if isinstance(failure, CallTimeout) else str(failure)
            return Symbolic("unreadable_answer", why)
        if found["equal"]:
            return Symbolic("equal")
        if found["gold"] != "expression":
            return Symbolic("unreadable_reference", "Math-Verify finds no expression in the reference")
        if found["answer"] != "expression":
            return Symbolic("unreadable_answer", "Math-Verify finds no expression in it")
        return Symbolic("different")

    def _reference_alone(self, gold: str, options: Mapping[str, Any]) -> Symbolic:
        """Return `equal` where a reference is read, and compared with itself and a number, in time; else the reason."""
        key = gold, repr(sorted(options.items()))
        known = self._known.get(key)
        if known is None:
            known = self._read_alone(gold, options)
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[key] = known
        return known

    def _read_alone(self, gold: str, options: Mapping[str, Any]) -> Symbolic:
        try:
            found: Mapping[str, Any] = {}
            # What is equal to itself may take for ever to be worked out beside anything else.
            for answer in (gold, _PLAIN_ANSWER):
                request = {"gold": gold, "answer": answer, **options}
                # It is done once for a reference, and a busy machine must not make it the culprit.
                found = self._share.pool.call(request, 2 * self._timeout_s)
        except CallTimeout as late:
            return Symbolic("comparison_timeout", f"Math-Verify gave {late} for the reference by itself")
        except NoProcess:
            # It is no reason to think so of the reference the next time.
            raise
        except CallFailed as failed:
            return Symbolic("comparison_failed", str(failed))
        if found["gold"] != "expression":
            return Symbolic("unreadable_reference", "Math-Verify finds no expression in the reference")
        return Symbolic("equal")
