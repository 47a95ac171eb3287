"""Grades a program: inputs go into the sandbox, answers come out, and are compared here.

What is expected never enters the sandbox that the program runs in. Tests that are data are graded in one run, each in
a process of its own; tests that have to be run are run in a second sandbox, where the program is only a name for calls
that go out and values that come back.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from rollgym.envs.code.answers import LATE, NOT_RUN, CallResult, Checked, RequestAnswer, result_of
from rollgym.envs.code.comparing import holds, same, same_approximately, same_stream
from rollgym.envs.code.conversation import SuiteConversation, evaluate_pairs
from rollgym.envs.code.inside import values
from rollgym.envs.code.item import Item, ItemError, Reference, sent_arguments
from rollgym.envs.code.runs import Calls, Runs, Units
from rollgym.envs.code.sandboxes import GraderFaultError, GradingLimits
from rollgym.envs.code.suites import Suite
from rollgym.sandbox.core.base import Sandbox

_SHOWN = 500


class Grader:
    """Grades programs in a sandbox.

    Args:
        sandbox: The sandbox that they run in.
        limits: What they may use, unless an item says otherwise.
    """

    def __init__(self, sandbox: Sandbox, limits: GradingLimits) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._known: Remembered[Mapping[int, Any]] = Remembered()

    def grade(
        self,
        item: Item,
        code: str,
        only: Sequence[int] | None = None,
        *,
        to_first_failure: bool = False,
        late: int = 0,
    ) -> list[Checked]:
        """Run the tests of an item, and return what became of each of them.

        Args:
            item: The item.
            code: The program.
            only: The numbers of the tests to run; all if None. The others are not passed.
            to_first_failure: Run no further test once one is failed.
            late: How many tests of this program have run out of time before.

        Raises:
            GraderFaultError: The sandbox failed, or the item's own tests cannot be run.
        """
        limits = replace(
            self._limits,
            seconds=max(self._limits.seconds, item.seconds or 0.0),
            memory_mb=item.memory_mb or self._limits.memory_mb,
        )
        job = _Job(Runs(self._sandbox, limits, late), item, code, to_first_failure)
        wanted = sorted(range(item.tests) if only is None else only)
        try:
            if item.suite is not None:
                found = self._by_suite(job, item.suite, frozenset(wanted))
            elif item.reference is not None:
                found = self._by_reference(job, item.reference, wanted)
            elif item.streams:
                found = _by_streams(job, wanted)
            else:
                found = _by_calls(job, wanted)
        except ItemError as error:
            raise GraderFaultError(str(error)) from None
        if item.before and any(each.unloadable for each in found.values()):
            self._see_that_it_loads(item.before, limits)
        return [found.get(number, Checked(False, NOT_RUN)) for number in range(item.tests)]

    def _by_suite(self, job: "_Job", suite: Suite, wanted: frozenset[int]) -> dict[int, Checked]:
        runs, item = job.runs, job.item
        known = self._values_of(suite)
        pairs = {pair.number: pair for pair in suite.pairs if pair.test in wanted}
        names = {suite.candidate: item.entry or ""}
        calls: Calls = {
            number: (names.get(pair.assertion.name, pair.assertion.name), known[number][0], known[number][1])
            for number, pair in pairs.items()
            if number in known
        }

        def right(number: int, result: CallResult) -> bool:
            # A number that is none compares with everything as false, and so it is unequal to anything.
            is_number = suite.mentions_nan or not result.has_nan
            return is_number and holds(pairs[number].assertion.relation, known[number][2], result.value)

        parts: dict[int, list[Checked]] = {}
        for number, checked in _judged(job, calls, right).items():
            parts.setdefault(pairs[number].test, []).append(checked)
        failed = any(not each.passed for checked in parts.values() for each in checked)
        unknown = frozenset(pairs) - known.keys()
        cases = {number: test for number, test in suite.cases.items() if test in wanted}
        cases |= {number: pairs[number].test for number in unknown}
        if cases and not (failed and job.to_first_failure):
            setup = runs.setup(_units(item, job.code), "solution")
            with SuiteConversation(self._sandbox, runs.limits()) as conversation:
                reports = conversation.hold(
                    suite.checking(unknown),
                    suite,
                    setup,
                    test_seconds=runs.test_seconds,
                    to_first_failure=job.to_first_failure,
                )
            for number, test in cases.items():
                parts.setdefault(test, []).append(reports.get(number, conversation.rest))
        return {
            test: next((each for each in checked if not each.passed), Checked(True))
            for test, checked in parts.items()
        }

    def _see_that_it_loads(self, before: str, limits: GradingLimits) -> None:
        """Tell a program that does not load from an item whose own source, before the program, does not.

        Raises:
            GraderFaultError: That source fails by itself.
        """

        def loaded() -> Mapping[int, Any]:
            calls: Calls = {0: ("nothing", [], {})}
            return Runs(self._sandbox, limits).calls([("before", before)], calls)

        result = self._known.get(json.dumps(["before", before]).encode(), loaded)[0]
        if result.unloadable:
            raise GraderFaultError(f"what the item runs before the program fails: {result.failure}")

    def _values_of(self, suite: Suite) -> dict[int, tuple[Any, ...]]:
        """Return the arguments and the expected value of the pairs, as far as they can be known."""
        literal = {pair.number: pair.assertion.literal() for pair in suite.pairs}
        known = {
            number: found for number, found in literal.items() if found is not None and _can_be_sent(found)
        }
        if len(known) < len(literal):
            script = suite.evaluation()
            content = json.dumps([script.before, script.units, script.functions]).encode()
            written = self._known.get(content, lambda: evaluate_pairs(self._sandbox, suite))
            # Built each time: an iterator can be passed only once.
            known |= {
                number: tuple(values.build(each) for each in parts)
                for number, parts in written.items()
                if number not in known
            }
        return known

    def _by_reference(self, job: "_Job", reference: Reference, wanted: Sequence[int]) -> dict[int, Checked]:
        calls: Calls = {number: (reference.name, args, {}) for number, args in enumerate(reference.inputs)}

        def expected() -> Mapping[int, Any]:
            results = job.runs.calls([("reference", reference.source)], calls)
            failed = next((result.failure for result in results.values() if result.failure), "")
            if failed:
                raise GraderFaultError(f"the item's canonical solution fails its own inputs: {failed}")
            return {number: result.value for number, result in results.items()}

        content = json.dumps([reference.source, values.plain(list(reference.inputs))]).encode()
        answers = self._known.get(content, expected)

        def right(number: int, result: CallResult) -> bool:
            if reference.tolerance is not None:
                return same_approximately(answers[number], result.value, reference.tolerance)
            return same(answers[number], result.value)

        return _judged(job, {number: calls[number] for number in wanted}, right)


@dataclass(frozen=True, slots=True)
class _Job:
    """A program that is graded."""

    runs: Runs
    item: Item
    code: str
    to_first_failure: bool


def _by_calls(job: _Job, wanted: Sequence[int]) -> dict[int, Checked]:
    item = job.item

    def right(number: int, result: CallResult) -> bool:
        return any(same(each, result.value, loose=item.loose) for each in item.calls[number].accepted)

    calls: Calls = {number: (item.calls[number].name, item.calls[number].args, {}) for number in wanted}
    return _judged(job, calls, right)


def _by_streams(job: _Job, wanted: Sequence[int]) -> dict[int, Checked]:
    streams = job.item.streams

    def fails(number: int, answer: RequestAnswer) -> bool:
        return not _of_stream(streams[number].accepted, answer).passed

    inputs = {number: streams[number].stdin for number in wanted}
    answers = job.runs.programs(job.item.language, job.code, inputs, fails if job.to_first_failure else None)
    return {number: _of_stream(streams[number].accepted, answer) for number, answer in answers.items()}


def _judged(job: _Job, calls: Calls, right: Callable[[int, CallResult], bool]) -> dict[int, Checked]:
    def checked(number: int, result: CallResult) -> Checked:
        return _of_result(result, not result.failure and right(number, result))

    def fails(number: int, answer: RequestAnswer) -> bool:
        return not checked(number, result_of(answer)).passed

    units = _units(job.item, job.code)
    results = job.runs.calls(units, calls, fails if job.to_first_failure else None)
    return {number: checked(number, result) for number, result in results.items()}


def _units(item: Item, code: str) -> Units:
    """Return what is loaded, one after the other, as the program."""
    if item.prompt and item.entry is not None and not defines(code, item.entry):
        return [("program", f"{item.prompt}{code}")]
    return [("before", item.before), ("program", code)] if item.before else [("program", code)]


def defines(code: str, name: str) -> bool:
    """Tell whether a program seems to define a name at its top."""
    starts = (f"def {name}", f"async def {name}", f"class {name}", f"{name} ", f"{name}=", f"{name}:")
    return any(line.startswith(starts) for line in code.splitlines())


def _can_be_sent(found: tuple[Any, ...]) -> bool:
    try:
        sent_arguments(found[0])
    except ItemError:
        return False
    return True


def shown(value: Any) -> str:
    """Return a value as a short text."""
    try:
        return repr(value)[:_SHOWN]
    except ValueError:
        # Python writes out no number of more than a few thousand digits.
        return "a value with a very large number in it"


def _of_result(result: CallResult, right: bool) -> Checked:
    if result.failure:
        return Checked(False, result.failure, unloadable=result.unloadable, late=result.late)
    return (
        Checked(True, answer=shown(result.value))
        if right
        else Checked(False, "wrong answer", shown(result.value))
    )


def _of_stream(accepted: Sequence[str], answer: RequestAnswer) -> Checked:
    if answer.status != "ended" or answer.exit != 0:
        return Checked(
            False,
            result_of(answer).failure,
            answer.output[:_SHOWN],
            unloadable="SyntaxError" in answer.errors,
            late=answer.status == LATE,
        )
    if same_stream(accepted, answer.output):
        return Checked(True, answer=answer.output[:_SHOWN])
    return Checked(False, "wrong answer", answer.output[:_SHOWN])


_Value = TypeVar("_Value")
_MOST = 64


class Remembered(Generic[_Value]):
    """Values by the content that they were made of; those used least recently are forgotten."""

    def __init__(self) -> None:
        self._values: OrderedDict[bytes, _Value] = OrderedDict()

    def get(self, content: bytes, make: Callable[[], _Value]) -> _Value:
        """Return what belongs to a content, making it if it is not known."""
        key = hashlib.blake2b(content, digest_size=16).digest()
        if key not in self._values:
            self._values[key] = make()
            if len(self._values) > _MOST:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return self._values[key]
