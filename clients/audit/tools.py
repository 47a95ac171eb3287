"""Tools: whether each answers every call that fits its schema, in every format of calls."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollgym.clients.audit.card import Entry, Verdict
from rollgym.clients.audit.subject import Subject
from rollgym.clients.checks.tool_replies import ToolReplies, call_formats, described_call
from rollgym.clients.client.session import EnvSession
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.tool_calls import ToolCall

_SECTION = "conformance"
_CHECK = "tools answer every call"
_REACHED = "replies reach the tools"
_SHARE = 0.1


async def audit_tools(subject: Subject) -> list[Entry]:
    """Call every tool in turn, as policies do at best and at worst."""
    replies = ToolReplies(subject.first_info, subject.settings.seed)
    if not replies.tools:
        return []
    deadline = subject.budget.share(_SHARE)
    async with subject.arena().sessions(1) as (session,):
        calls = _Calls(session)
        failed = await calls.make_all(replies, deadline)
    counted = f"{len(replies.tools)} tools, {calls.made} calls"
    entries = failed or [Entry(_SECTION, _CHECK, Verdict.OK, counted, "", {"calls": calls.made})]
    entries += [
        Entry(
            _SECTION,
            _CHECK,
            Verdict.WARNING,
            note,
            "give the tool a schema from which arguments can be drawn",
        )
        for note in replies.notes
    ]
    return [*entries, calls.reached_entry(list(replies.tools)), *await _formats(subject, deadline)]


class _Calls:
    """Calls tools in one session, episode after episode."""

    def __init__(self, session: EnvSession) -> None:
        self._session = session
        self._seed = 0
        self._begun = False
        self._reached: set[str] = set()
        self.made = 0

    async def make_all(self, replies: ToolReplies, deadline: float) -> list[Entry]:
        """Call all tools in turns until the deadline; a tool that fails is not called again."""
        failed: dict[str, Entry] = {}
        for call in replies.rounds():
            # Each tool is called once, however long that takes.
            if self.made >= len(replies.tools) and time.monotonic() > deadline:
                break
            if call.name not in failed and (problem := await self.make(replies, call)):
                detail = f"{described_call(call)}: {problem}"
                remedy = "raise `rollgym.ToolError` for what a tool cannot do; `roll-env check` names file and line"
                failed[call.name] = Entry(_SECTION, _CHECK, Verdict.FAILED, detail, remedy)
        return list(failed.values())

    async def make(self, replies: ToolReplies, call: ToolCall) -> ProblemError | None:
        """Make a call; return the server's problem, if that is the answer."""
        self.made += 1
        try:
            if not self._begun:
                await self._session.reset(self._seed)
                self._seed += 1
                self._begun = True
            result = await self._session.step(replies.write(call))
        except ProblemError as problem:
            self._begun = False
            if problem.code == "env_error":
                self._reached.add(call.name)
            return problem
        if result.info.get("action_is_valid") is not False:
            self._reached.add(call.name)
        self._begun = not (result.terminated or result.truncated)
        return None

    def reached_entry(self, names: Sequence[str]) -> Entry:
        """Say which tools no reply has reached."""
        missed = [name for name in names if name not in self._reached]
        if not missed:
            return Entry(_SECTION, _REACHED, Verdict.OK)
        return Entry(
            _SECTION,
            _REACHED,
            Verdict.WARNING,
            f"no call of {', '.join(missed)} was taken",
            "see that calls are read as the instruction asks for them, and that the schemas allow what tools take",
        )

    @property
    def reached(self) -> bool:
        """Whether any tool was reached."""
        return bool(self._reached)


async def _formats(subject: Subject, deadline: float) -> list[Entry]:
    """Make an ordinary call in each format that the kwarg `call_format` can be."""
    deaf: list[str] = []
    tried: list[str] = []
    for name in call_formats(subject.env.kwargs_schema):
        if tried and time.monotonic() > deadline:
            break
        (session,) = await subject.client.make_many(
            subject.env.env_id, 1, {**subject.kwargs, "call_format": name}
        )
        try:
            replies = ToolReplies({**subject.first_info, "call_format": name})
            calls = _Calls(session)
            for tool in replies.tools:
                if (call := next(replies.calls(tool), None)) is not None:
                    await calls.make(replies, call)
        finally:
            await subject.client.close_sessions([session])
        tried.append(name)
        if not calls.reached:
            deaf.append(name)
    if not tried:
        return []
    if deaf:
        detail = f"no call written in {', '.join(deaf)} reaches a tool"
        remedy = "offer only formats that the environment reads"
        return [Entry(_SECTION, "every call format works", Verdict.WARNING, detail, remedy)]
    return [Entry(_SECTION, "every call format works", Verdict.OK, ", ".join(tried))]
