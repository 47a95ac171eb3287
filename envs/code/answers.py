"""The lines that a program's own server writes: one answer to each request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rollgym.envs.code.inside import values

NOT_RUN = "not run, since another test had failed"
"""Why a test is not passed that was not needed any more."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of one test.

    Attributes:
        passed: Whether it is passed.
        why: In a few words, if it is not.
        answer: What the program answered, as text, if anything.
        unloadable: Whether the program could not even be loaded.
        late: Whether it ran out of time.
    """

    passed: bool
    why: str = ""
    answer: str = ""
    unloadable: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class RequestAnswer:
    """What became of one request.

    Attributes:
        status: `answered`, `ended`, `late`, `flooded`, or `missing`.
        reply: What was answered, as the program's process wrote it.
        exit: The exit code of a program that ended; negative for a signal.
        output: What it wrote.
        errors: The end of what it wrote as errors.
    """

    status: str
    reply: str = ""
    exit: int | None = None
    output: str = ""
    errors: str = ""


@dataclass(frozen=True, slots=True)
class CallResult:
    """What a call came to: a value, or why there is none.

    Attributes:
        value: The answer, if any.
        failure: In a few words; empty if it answered.
        unloadable: Whether the program could not even be loaded.
        late: Whether it ran out of time.
        has_nan: Whether the answer is or holds a number that is not one.
    """

    value: Any = None
    failure: str = ""
    unloadable: bool = False
    late: bool = False
    has_nan: bool = False


LATE = "late"
MISSING = RequestAnswer("missing")
GIVEN_UP = RequestAnswer("given up")
NOT_ASKED = RequestAnswer("not asked")


def whole_characters(text: str) -> str:
    """Return what a program said as text that can be sent: half a character (a lone surrogate) cannot."""
    return text.encode(errors="replace").decode()


def read_answers(output: bytes, count: int) -> list[RequestAnswer]:
    """Return the answer to each request, by number.

    Whatever a program may have written in between is left out, and what is answered twice is not answered.
    """
    found: dict[int, RequestAnswer] = {}
    for line in output.split(b"\n"):
        answer = _read(line)
        if answer is not None and 0 <= answer[0] < count:
            found[answer[0]] = RequestAnswer("doubled") if answer[0] in found else answer[1]
    return [found.get(number, MISSING) for number in range(count)]


def _read(line: bytes) -> tuple[int, RequestAnswer] | None:
    try:
        data = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(data, dict) or type(data.get("id")) is not int:
        return None
    texts = {name: data.get(name, "") for name in ("status", "reply", "output", "errors")}
    code = data.get("exit")
    if any(type(each) is not str for each in texts.values()) or (code is not None and type(code) is not int):
        return None
    return data["id"], RequestAnswer(exit=code, **texts)


def result_of(answer: RequestAnswer) -> CallResult:
    """Return the value that a call answered with, or why there is none."""
    if answer.status != "answered":
        return CallResult(failure=_ENDS.get(answer.status, _ended(answer)), late=answer.status == LATE)
    try:
        reply = values.read_json(answer.reply)
        if isinstance(reply, Mapping) and "dict" not in reply:
            return _raised(reply)
        told = values.build(reply)
    except values.ValueRefusedError as error:
        return CallResult(failure=f"the answer is no value: {error}")
    if isinstance(told, dict) and "coroutine" in told:
        return CallResult(failure="it returned a coroutine, which is not awaited")
    if not isinstance(told, dict) or "value" not in told:
        return CallResult(failure="the answer is of no known form")
    return CallResult(value=told["value"], has_nan=values.holds_nan(reply))


def _raised(reply: Mapping[str, Any]) -> CallResult:
    names: Sequence[Any] = reply.get("raised") or ["an answer that is no plain value"]
    text = str(reply.get("text") or reply.get("refused") or "")[:200]
    name = str(names[0])[:50] if isinstance(names, list) and names else "?"
    return CallResult(
        failure=whole_characters(f"{name}: {text}".strip(": ")), unloadable=reply.get("loading") is True
    )


def _ended(answer: RequestAnswer) -> str:
    if answer.exit is not None and answer.exit < 0:
        return f"the program was ended by signal {-answer.exit}"
    last = answer.errors.strip().rpartition("\n")[2][:200]
    return f"the program ended with exit code {answer.exit}{': ' + last if last else ''}"


_ENDS = {
    LATE: "the time was over",
    "given up": "not run, since other tests ran out of time",
    "not asked": NOT_RUN,
    "flooded": "the answer is too large",
    "missing": "there is no answer",
    "doubled": "there are two answers",
}
