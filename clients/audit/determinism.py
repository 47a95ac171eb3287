"""Determinism: whether seed and actions determine an episode, and which other causes do if they do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rollgym.clients.audit.arena import Episode, PlannedEpisode
from rollgym.clients.audit.card import CardEntry, CardVerdict
from rollgym.clients.audit.policies import AuditPolicy, GiveUp, Player, random_policy, script_policy
from rollgym.clients.audit.subject import Subject, discover

_SECTION = "determinism"
_EPISODES = 8
_STEPS = 40
_NOISE = 12
_PAUSE_S = 0.15
_REPLAY = "replay"

_FIELDS = ("observation", "reward", "terminated", "truncated", "success")
_OWN_RANDOM = "draw everything from `self.np_random`, which `super().reset(seed=seed)` sets"
_OWN_STATE = "keep state in `self`, set all of it in `reset`, and draw from `self.np_random` only"


class _Comparison:
    """Episodes beside the same episodes played otherwise."""

    def __init__(self, reference: Sequence[Episode], others: Sequence[Episode]) -> None:
        self.apart = 0
        self.first = ""
        self.fields: set[str] = set()
        by_seed = {episode.seed: episode for episode in others}
        pairs = [(one, by_seed[one.seed]) for one in reference if one.seed in by_seed]
        self.compared = len(pairs)
        for one, other in pairs:
            where = _difference(one, other)
            if where is not None:
                self.apart += 1
                self.fields |= where[1]
                self.first = self.first or f"with seed {one.seed} at {where[0]}"

    @property
    def equal(self) -> bool:
        """Whether the two sets of episodes are equal."""
        return not self.apart

    def __str__(self) -> str:
        named = ", ".join(field for field in _FIELDS if field in self.fields) or "length"
        return f"{self.apart} of {self.compared} episodes differ in {named}, first {self.first}"

    def numbers(self) -> dict[str, Any]:
        """Return the numbers for programs."""
        return {"compared": self.compared, "different": self.apart, "fields": sorted(self.fields)}


def _difference(one: Episode, other: Episode) -> tuple[str, set[str]] | None:
    for step, (left, right) in enumerate(zip(one.marks, other.marks, strict=False)):
        fields = {name for name in _FIELDS if getattr(left, name) != getattr(right, name)}
        if fields:
            return ("the reset" if step == 0 else f"step {step}"), fields
    if len(one.marks) != len(other.marks):
        return f"step {min(len(one.marks), len(other.marks))}", set()
    return None


async def audit_determinism(subject: Subject) -> list[CardEntry]:
    """Play equal seeds and actions again: later, elsewhere, after others, beside others, slowly."""
    arena, budget = subject.arena(), subject.budget
    player = random_policy(subject.action_space, subject.wording)
    games = [PlannedEpisode(player, seed) for seed in subject.seeds("determinism", _EPISODES)]
    alone_in_turn = partial(arena.play, width=1, fresh=True, max_steps=_STEPS)
    # Alone and one after the other, before anything else has been played: the results of a fresh process.
    reference = await alone_in_turn(games, deadline=budget.share(0.1))
    reference = [each for each in reference if each.problem is None]
    if not reference:
        detail = "no episode could be played without a failure, in time"
        return [CardEntry(_SECTION, "same again", CardVerdict.SKIPPED, detail)]
    again = [PlannedEpisode(script_policy(each.actions, _REPLAY), each.seed) for each in reference]
    alone = _Comparison(reference, await alone_in_turn(again, deadline=budget.share(0.1)))
    elsewhere = None
    if subject.elsewhere is not None:
        async with subject.elsewhere() as client:
            # That process must have seen the same as this one had when the reference was played.
            await discover(client, subject.env.env_id, subject.kwargs)
            fresh = await subject.arena(client).play(
                again, width=1, fresh=True, max_steps=_STEPS, deadline=budget.share(0.1)
            )
            elsewhere = _Comparison(reference, fresh)
    noise = [PlannedEpisode(_restless(player), seed) for seed in subject.seeds("noise", _NOISE)]
    later = await arena.play([*noise, *again], width=1, max_steps=_STEPS, deadline=budget.share(0.1))
    crowd = await arena.play(
        _mixed(again, noise),
        width=len(again) + len(noise),
        fresh=True,
        max_steps=_STEPS,
        deadline=budget.share(0.1),
    )
    slow = await arena.play(
        again,
        width=len(again),
        fresh=True,
        pause_s=_PAUSE_S,
        max_steps=_STEPS,
        deadline=budget.share(0.1),
    )
    after, beside, slowly = (
        _Comparison(reference, [each for each in played if each.policy == _REPLAY])
        for played in (later, crowd, slow)
    )
    return _entries(subject.env.deterministic, alone, elsewhere, after, beside, slowly)


def _restless(policy: AuditPolicy) -> AuditPolicy:
    """Play as another, and leave in the middle of every second episode."""

    def begin(seed: int) -> Player:
        play = policy.begin(seed)
        left = 3 if seed % 2 else _STEPS

        def restless(observation: Any, info: Mapping[str, Any]) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise GiveUp
            return play(observation, info)

        return restless

    return AuditPolicy("noise", begin, policy.options)


def _mixed(games: Sequence[PlannedEpisode], noise: Sequence[PlannedEpisode]) -> list[PlannedEpisode]:
    longest = max(len(games), len(noise))
    pairs = [(noise[at : at + 1], games[at : at + 1]) for at in range(longest)]
    return [game for first, second in pairs for game in (*first, *second)]


def _entries(
    declared: bool,
    alone: _Comparison,
    elsewhere: _Comparison | None,
    after: _Comparison,
    beside: _Comparison,
    slow: _Comparison,
) -> list[CardEntry]:
    """Report which way of replaying changes the episodes, and the cause that it indicates."""
    entries = []

    def add(check: str, comparison: _Comparison, meaning: str, remedy: str) -> None:
        if not comparison.compared:
            entries.append(
                CardEntry(_SECTION, check, CardVerdict.SKIPPED, "no episode was played again in time")
            )
            return
        if comparison.equal:
            detail = f"{comparison.compared} episodes are equal, step by step"
            entries.append(CardEntry(_SECTION, check, CardVerdict.OK, detail, numbers=comparison.numbers()))
            return
        verdict = CardVerdict.FAILED if declared else CardVerdict.OK
        detail = f"{meaning}: {comparison}" if declared else f"{comparison}, as it declares"
        entries.append(
            CardEntry(_SECTION, check, verdict, detail, remedy if declared else "", comparison.numbers())
        )

    if not alone.equal and elsewhere is not None and elsewhere.equal:
        add(
            "same again",
            alone,
            "leak across sessions, since a fresh process agrees",
            f"what the class or a module holds is shared by all sessions of a process: {_OWN_STATE}",
        )
    elif not alone.equal:
        only_reward = alone.fields == {"reward"}
        add(
            "same again",
            alone,
            "the reward is not deterministic" if only_reward else "not deterministic",
            f"{'let no clock into the reward, and ' if only_reward else ''}{_OWN_RANDOM}",
        )
    else:
        add("same again", alone, "", "")
    if elsewhere is None:
        entries.append(
            CardEntry(
                _SECTION,
                "in another process",
                CardVerdict.SKIPPED,
                "a running server cannot be started again; audit without --url, where it can",
            )
        )
    else:
        add(
            "in another process",
            elsewhere,
            "differs in a fresh process with another hash seed"
            if alone.equal
            else "differs in a fresh process",
            "use no `hash()`, no order of sets, no process id and no address of an object"
            if alone.equal
            else _OWN_RANDOM,
        )
    for check, comparison, meaning, remedy in (
        (
            "after other episodes",
            after,
            "leak across episodes",
            f"`reset` must undo all that an episode did, one that was left in the middle too: {_OWN_STATE}",
        ),
        (
            "beside other sessions",
            beside,
            "leak across sessions that take turns",
            f"global generators and class attributes are shared by all sessions of a process: {_OWN_STATE}",
        ),
        ("played slowly", slow, "depends on the wall clock", "let no clock into state or reward"),
    ):
        # Slow play runs beside other sessions, too: if those alone change the episodes, the clock cannot be blamed.
        if alone.equal and (comparison is not slow or beside.equal):
            add(check, comparison, meaning, remedy)
    same = all(each is None or each.equal for each in (alone, elsewhere, after, beside, slow))
    entries.append(_declaration(declared, same))
    return entries


def _declaration(declared: bool, same: bool) -> CardEntry:
    check = "declares it"
    if declared:
        if same:
            return CardEntry(_SECTION, check, CardVerdict.OK, "declared deterministic, and is")
        return CardEntry(
            _SECTION,
            check,
            CardVerdict.FAILED,
            "declared deterministic, and is not",
            "mend it, or set metadata['deterministic'] = False: lost sessions then end, and are not rebuilt",
        )
    if same:
        return CardEntry(
            _SECTION,
            check,
            CardVerdict.WARNING,
            "not declared deterministic, and looks as if it were",
            "set metadata['deterministic'] = True if seed and actions fix everything: lost sessions are rebuilt then",
        )
    return CardEntry(_SECTION, check, CardVerdict.OK, "declared not deterministic, and is not")
