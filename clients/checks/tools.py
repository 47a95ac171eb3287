"""Whether an environment's tools answer every call that fits their schemas."""

from __future__ import annotations

import signal
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium

from rollgym.clients.checks.report import Finding, Status
from rollgym.clients.checks.target import CheckTarget
from rollgym.clients.checks.tool_replies import ToolReplies, call_formats, described_call
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.tool_calls import ToolCall

CHECK = "tools answer every call"
_REACHED = "replies reach the tools"
_FORMATS = "every call format works"
_TOOL_ERROR = "raise `rollgym.ToolError` for what a tool cannot do: its message is the result of the call"
_PATIENCE_S = 30.0
_CALL_TIMEOUT_S = 10.0
_NOT_THE_AUTHORS = (
    str(Path(__file__).parents[2]),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
)


def check_tools(target: CheckTarget) -> Iterator[Finding]:
    """Call every tool in turn, as policies do at best and at worst."""
    env = target.build()
    try:
        findings = list(check_tools_of(env))
    finally:
        env.close()
    yield from findings
    if findings:
        schema = getattr(type(env.unwrapped), "kwargs_schema", None)
        yield from _check_formats(target, call_formats(schema))


def check_tools_of(env: gymnasium.Env[Any, Any]) -> Iterator[Finding]:
    """Call every tool of an environment that is there, here or on a server."""
    calls = _Calls(env)
    if calls.replies.tools:
        yield from calls.answers()
        yield from calls.reached()


class _Calls:
    """Calls tools of one environment, episode after episode."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._env = env
        self._seed = 0
        self._deadline = time.monotonic() + _PATIENCE_S
        self._reached: set[str] = set()
        self._last_answer: dict[str, str] = {}
        self.made = 0
        self.replies = ToolReplies(self._reset())

    def answers(self) -> Iterator[Finding]:
        """Call each tool with all that is drawn; a tool that raises is not called again."""
        failed = set()
        late = False
        for call in self.replies.rounds():
            # Each tool is called once, however long that takes.
            late = time.monotonic() > self._deadline
            if late and self.made >= len(self.replies.tools):
                break
            if call.name not in failed and (finding := self.make(call)) is not None:
                failed.add(call.name)
                yield finding
                self._reset()
        if not failed:
            in_time = f", all that fitted into {_PATIENCE_S:g} s" if late else ""
            yield Finding(CHECK, Status.PASS, f"{len(self.replies.tools)} tools, {self.made} calls{in_time}")
        for note in self.replies.notes:
            yield Finding(
                CHECK, Status.WARN, note, "give the tool a schema from which arguments can be drawn"
            )

    def reached(self) -> Iterator[Finding]:
        """Say which tools no reply has reached."""
        missed = [name for name in self.replies.tools if name not in self._reached]
        if not missed:
            yield Finding(_REACHED, Status.PASS)
            return
        answer = self._last_answer.get(missed[0])
        yield Finding(
            _REACHED,
            Status.WARN,
            f"no call of {', '.join(missed)} was taken"
            + (f"; the last one was answered: {answer[:200]}" if answer else ""),
            "see that calls are read as the instruction asks for them, and that the schemas allow what the tools take",
        )

    def make(self, call: ToolCall) -> Finding | None:
        """Make a call; return the fault of the answer."""
        self.made += 1
        try:
            with _time_limit(_CALL_TIMEOUT_S):
                observation, _, terminated, truncated, info = self._env.step(self.replies.write(call))
        except ProblemError as problem:  # of an environment on a server, so the line is unknown
            self._reached.add(call.name)
            return Finding(CHECK, Status.FAIL, f"{described_call(call)}: {problem}", _TOOL_ERROR)
        except Exception as error:  # noqa: BLE001 - the author's code, whose failures are what is looked for
            self._reached.add(call.name)
            return Finding(
                CHECK,
                Status.FAIL,
                f"{described_call(call)} raises {type(error).__name__}: {error}",
                f"raised at {_place(error)}; {_remedy(error)}",
            )
        if info.get("action_is_valid") is not False:
            self._reached.add(call.name)
        self._last_answer[call.name] = str(observation)
        if observation not in self._env.observation_space:
            what = f"{described_call(call)} gives an observation out of the space: {str(observation)[:60]!r}"
            return Finding(CHECK, Status.FAIL, what, "return text without half characters (lone surrogates)")
        if terminated or truncated:
            self._reset()
        return None

    def reaches(self) -> bool:
        """Make one ordinary call of each tool; return whether any was taken. Exceptions of a tool propagate."""
        for name in self.replies.tools:
            for call in self.replies.calls(name):
                if (finding := self.make(call)) is not None:
                    raise RuntimeError(finding.detail)
                break
        return bool(self._reached)

    def _reset(self) -> dict[str, Any]:
        _, info = self._env.reset(seed=self._seed)
        self._seed += 1
        return info


def _check_formats(target: CheckTarget, formats: Sequence[str]) -> Iterator[Finding]:
    """Make calls in all formats that an environment can be made with."""
    deaf: list[str] = []
    tried: list[str] = []
    deadline = time.monotonic() + _PATIENCE_S
    for name in formats:
        if time.monotonic() > deadline:
            break
        tried.append(name)
        env = CheckTarget(target.name, {**target.kwargs, "call_format": name}).build()
        try:
            if not _Calls(env).reaches():
                deaf.append(name)
        finally:
            env.close()
    if deaf:
        detail = f"no call written in {', '.join(deaf)} reaches a tool"
        yield Finding(_FORMATS, Status.WARN, detail, "offer only formats that the environment reads")
    elif tried:
        left = len(formats) - len(tried)
        in_time = f"; {left} others did not fit into {_PATIENCE_S:g} s" if left else ""
        yield Finding(_FORMATS, Status.PASS, ", ".join(tried) + in_time)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Interrupt code that takes longer; possible in the main thread only.

    Raises:
        TimeoutError: It took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _place(error: Exception) -> str:
    """Return the line of the author's own code that raised an error, or else the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_AUTHORS)]
    last = (own or frames)[-1]
    return f"{last.filename}:{last.lineno} in {last.name}"


def _remedy(error: Exception) -> str:
    if isinstance(error, TypeError) and "argument" in str(error):
        return (
            "the tool's function must take all that its schema allows: defaults for what is not required, and "
            "`additionalProperties: false`, as `rollgym.tool_parameters` has it"
        )
    if isinstance(error, TimeoutError):
        return "bound in the schema, or in the tool, what a call may cost: a policy will send this"
    return _TOOL_ERROR
