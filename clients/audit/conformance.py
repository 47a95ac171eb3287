"""Conformance: spaces, flags, instruction, limits, behaviour after the end, and tools that answer every valid call."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from gymnasium import spaces

from rollgym.clients.audit.card import CardEntry, CardVerdict
from rollgym.clients.audit.policies import GiveUp, constant_policy, listed_actions, random_policy, takes_text
from rollgym.clients.audit.subject import Subject
from rollgym.clients.checks.local import ODD_TEXTS
from rollgym.clients.checks.tool_replies import ToolReplies, call_formats, described_call
from rollgym.clients.client.session import EnvSession
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.protocol.values import encode_value

_SECTION = "conformance"
_NONSENSE = "qwzx no such action zxwq"
_FEW = 4
_MOST_STEPS = 400


async def audit_conformance(subject: Subject) -> list[CardEntry]:
    """Check all answers, and play actions that no good policy plays."""
    odd = await _odd_actions(subject)
    limit = await _limit(subject)
    after = await _after_the_end(subject)
    return [*_seen(subject), odd, *await _validity(subject), limit, after]


def _seen(subject: Subject) -> list[CardEntry]:
    watch, speaks = subject.watch, takes_text(subject.action_space)
    entries = []
    for check, kind, severe, remedy in (
        (
            "observations in the space",
            "observation out of the space",
            CardVerdict.FAILED,
            "return what `observation_space` promises: bounds, shape and dtype",
        ),
        (
            "instruction",
            "no instruction",
            CardVerdict.FAILED if speaks else None,
            "let reset's info['instruction'] tell what to do and how to answer",
        ),
        (
            "success",
            "no success",
            CardVerdict.FAILED if speaks else CardVerdict.WARNING,
            "say in info['success'] of the last step whether the task is solved: a bool, apart from `terminated`",
        ),
        (
            "nothing is solved at the reset",
            "success at the reset",
            CardVerdict.FAILED,
            "`success` is false until the task is solved",
        ),
        ("no failures", "broke off", CardVerdict.FAILED, "an environment answers every action of its space"),
    ):
        where = watch.first(kind)
        if not where and not watch.looks:
            entries.append(
                CardEntry(_SECTION, check, CardVerdict.SKIPPED, "nothing came back without a failure")
            )
        elif not where:
            detail = f"{watch.looks:,} looked at" if kind == "observation out of the space" else ""
            entries.append(CardEntry(_SECTION, check, CardVerdict.OK, detail))
        elif severe is None:
            entries.append(
                CardEntry(_SECTION, check, CardVerdict.SKIPPED, "actions are no texts, so nobody reads one")
            )
        else:
            entries.append(CardEntry(_SECTION, check, severe, where, remedy, {"count": watch.count(kind)}))
    return entries


async def _odd_actions(subject: Subject) -> CardEntry:
    """Play typical texts of models, or actions outside the space."""
    space = subject.action_space
    async with subject.arena().sessions(1) as (session,):
        if takes_text(space):
            texts = [text for text in (*ODD_TEXTS, _NONSENSE) if text in space]
            seed = await _sound_seed(subject, session)
            if seed is None:
                return CardEntry(_SECTION, "odd replies", CardVerdict.SKIPPED, "plain replies fail as well")
            for text in texts:
                try:
                    await session.reset(seed)
                    await session.step(text)
                except ProblemError as problem:
                    return CardEntry(
                        _SECTION,
                        "odd replies",
                        CardVerdict.FAILED,
                        f"{text[:40]!r}: {problem}",
                        "a reply that cannot be read is an observation to learn from, never an exception",
                    )
            return CardEntry(_SECTION, "odd replies", CardVerdict.OK, f"{len(texts)} of them are answered")
        check = "actions outside the space"
        outside = _outside(space)
        if outside is None:
            return CardEntry(_SECTION, check, CardVerdict.SKIPPED, f"every value fits {space}")
        await session.reset(0)
        operation = session.plan_step(space.sample())
        operation.fields["action"] = outside
        (result,) = await subject.client.run_many([operation])
        if isinstance(result, ProblemError):
            return CardEntry(_SECTION, check, CardVerdict.OK, f"refused as {result.code}")
        return CardEntry(
            _SECTION, check, CardVerdict.FAILED, f"{outside} is taken", "refuse it as `invalid_action`"
        )


async def _sound_seed(subject: Subject, session: EnvSession) -> int | None:
    """Return a seed whose episode accepts plain replies: failures with every reply are reported by another check."""
    for seed in subject.seeds("odd", _FEW):
        player = random_policy(subject.action_space, subject.wording).begin(seed)
        try:
            await session.step(player(*await session.reset(seed)))
        except ProblemError:
            continue
        return seed
    return None


def _outside(space: Any) -> Any:
    """Return an action, as it is on the wire, that is not of the space."""
    if isinstance(space, spaces.Discrete):
        return int(space.start) + int(space.n)
    if isinstance(space, spaces.Box) and space.is_bounded("above"):
        return encode_value(space, space.high + 1, binary=False)
    if isinstance(space, spaces.MultiDiscrete):
        return encode_value(space, space.start + space.nvec, binary=False)
    return None


async def _validity(subject: Subject) -> list[CardEntry]:
    """Check whether `action_is_valid` distinguishes readable from unreadable actions."""
    check = "action_is_valid"
    if not takes_text(subject.action_space):
        return []
    listed = [each for each in listed_actions(subject.first_info) if isinstance(each, str)]
    async with subject.arena().sessions(1) as (session,):
        try:
            await session.reset(0)
            nonsense = (await session.step(_NONSENSE)).info.get("action_is_valid")
            real = []
            for action in listed[:_FEW]:
                await session.reset(0)
                real.append((await session.step(subject.wording.write(action))).info.get("action_is_valid"))
        except ProblemError as problem:
            return [CardEntry(_SECTION, check, CardVerdict.SKIPPED, str(problem))]
    remedy = "say in info['action_is_valid'] whether the reply could be read"
    if type(nonsense) is not bool:
        return [CardEntry(_SECTION, check, CardVerdict.WARNING, f"a step's info says {nonsense!r}", remedy)]
    if listed and nonsense:
        return [
            CardEntry(
                _SECTION,
                check,
                CardVerdict.FAILED,
                f"{_NONSENSE!r} is called valid, and is not listed",
                remedy,
            )
        ]
    if any(each is not True for each in real):
        return [
            CardEntry(
                _SECTION, check, CardVerdict.FAILED, f"listed actions {listed[:_FEW]} give {real}", remedy
            )
        ]
    detail = "listed actions are, nonsense is not" if listed else f"{nonsense} for nonsense"
    return [CardEntry(_SECTION, check, CardVerdict.OK, detail)]


async def _limit(subject: Subject) -> CardEntry:
    """Check that episodes end, at the latest at the declared limit."""
    check = "ends at its limit"
    declared = subject.declared_steps
    played = subject.all_played()
    beyond = [each for each in played if declared is not None and each.steps > declared]
    if beyond:
        return CardEntry(
            _SECTION,
            check,
            CardVerdict.FAILED,
            f"with seed {beyond[0].seed} an episode goes on after {declared} steps",
            "set `truncated` at max_episode_steps, unreadable replies counted",
            {"declared": declared},
        )
    at_limit = [each for each in played if each.steps == declared and each.ended]
    if at_limit:
        cut = sum(each.marks[-1].truncated for each in at_limit)
        unsolved = [each for each in at_limit if not each.marks[-1].truncated and not each.solved]
        # If solved episodes end earlier, the limit ends the others.
        sooner = any(each.solved and each.steps < declared for each in played if declared is not None)
        if cut == 0 and len(unsolved) > 1 and sooner:
            return CardEntry(
                _SECTION,
                check,
                CardVerdict.WARNING,
                f"{len(unsolved)} unsolved episodes end at step {declared} as terminated, none as truncated",
                "a limit truncates; terminated means that the task itself ended",
                {"declared": declared},
            )
        return CardEntry(
            _SECTION,
            check,
            CardVerdict.OK,
            f"{cut} of {len(at_limit)} episodes of {declared} steps were truncated",
        )
    if declared is None:
        idle = await subject.arena().play(
            subject.games(_idle(subject), "limit", _FEW), deadline=subject.budget.share(0.1)
        )
        together = [*played, *(each for each in idle if each.problem is None)]
        if not together:
            return CardEntry(
                _SECTION, check, CardVerdict.SKIPPED, "no episode could be played without a failure"
            )
        if any(each.ended for each in together):
            return CardEntry(_SECTION, check, CardVerdict.OK, "no limit is declared; episodes end")
        return CardEntry(
            _SECTION,
            check,
            CardVerdict.WARNING,
            f"no limit is declared, and no episode ended in {subject.arena().max_steps} steps",
            "truncate after a number of steps, and declare metadata['max_episode_steps']",
        )
    if any(each.ended for each in played):
        longest = max(each.steps for each in played)
        return CardEntry(
            _SECTION, check, CardVerdict.OK, f"declared {declared}; the longest episode had {longest}"
        )
    return CardEntry(
        _SECTION, check, CardVerdict.SKIPPED, f"no episode came to its end; {declared} steps are declared"
    )


def _idle(subject: Subject) -> Any:
    if takes_text(subject.action_space):
        return constant_policy(_NONSENSE, "idle")
    return random_policy(subject.action_space, subject.wording)


async def _after_the_end(subject: Subject) -> CardEntry:
    """Step once more when the episode is over."""
    check = "no step after the end"
    async with subject.arena().sessions(1) as (session,):
        steps = min(_MOST_STEPS, subject.arena().max_steps)
        for seed in subject.seeds("after", _FEW):
            player = random_policy(subject.action_space, subject.wording).begin(seed)
            try:
                observation, info = await session.reset(seed)
                for _ in range(steps):
                    action = player(observation, info)
                    observation, _, terminated, truncated, info = await session.step(action)
                    if terminated or truncated:
                        return await _one_more(session, action)
            except (ProblemError, GiveUp):
                continue
    return CardEntry(_SECTION, check, CardVerdict.SKIPPED, "no episode came to its end")


async def _one_more(session: EnvSession, action: Any) -> CardEntry:
    check = "no step after the end"
    try:
        result = await session.step(action)
    except ProblemError as problem:
        return CardEntry(_SECTION, check, CardVerdict.OK, f"refused as {problem.code}")
    paid = f"and pays {result.reward:g}" if math.isfinite(result.reward) else "and pays no number"
    return CardEntry(
        _SECTION,
        check,
        CardVerdict.FAILED,
        f"a step after the end is taken, {paid}",
        "answer it with `episode_over` until the next reset",
        {"reward": result.reward},
    )


_CHECK = "tools answer every call"
_REACHED = "replies reach the tools"
_SHARE = 0.1


async def audit_tools(subject: Subject) -> list[CardEntry]:
    """Call every tool in turn, as policies do at best and at worst."""
    replies = ToolReplies(subject.first_info, subject.settings.seed)
    if not replies.tools:
        return []
    deadline = subject.budget.share(_SHARE)
    async with subject.arena().sessions(1) as (session,):
        calls = _Calls(session)
        failed = await calls.make_all(replies, deadline)
    counted = f"{len(replies.tools)} tools, {calls.made} calls"
    entries = failed or [CardEntry(_SECTION, _CHECK, CardVerdict.OK, counted, "", {"calls": calls.made})]
    entries += [
        CardEntry(
            _SECTION,
            _CHECK,
            CardVerdict.WARNING,
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

    async def make_all(self, replies: ToolReplies, deadline: float) -> list[CardEntry]:
        """Call all tools in turns until the deadline; a tool that fails is not called again."""
        failed: dict[str, CardEntry] = {}
        for call in replies.rounds():
            # Each tool is called once, however long that takes.
            if self.made >= len(replies.tools) and time.monotonic() > deadline:
                break
            if call.name not in failed and (problem := await self.make(replies, call)):
                detail = f"{described_call(call)}: {problem}"
                remedy = "raise `rollgym.ToolError` for what a tool cannot do; `roll-env check` names file and line"
                failed[call.name] = CardEntry(_SECTION, _CHECK, CardVerdict.FAILED, detail, remedy)
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

    def reached_entry(self, names: Sequence[str]) -> CardEntry:
        """Say which tools no reply has reached."""
        missed = [name for name in names if name not in self._reached]
        if not missed:
            return CardEntry(_SECTION, _REACHED, CardVerdict.OK)
        return CardEntry(
            _SECTION,
            _REACHED,
            CardVerdict.WARNING,
            f"no call of {', '.join(missed)} was taken",
            "see that calls are read as the instruction asks for them, and that the schemas allow what tools take",
        )

    @property
    def reached(self) -> bool:
        """Whether any tool was reached."""
        return bool(self._reached)


async def _formats(subject: Subject, deadline: float) -> list[CardEntry]:
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
        return [CardEntry(_SECTION, "every call format works", CardVerdict.WARNING, detail, remedy)]
    return [CardEntry(_SECTION, "every call format works", CardVerdict.OK, ", ".join(tried))]
