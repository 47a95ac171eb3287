"""Difficulty: how often random play and the expert solve it, and how long episodes are."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from clients.audit.baselines import play_expert
from clients.audit.card import Entry, Verdict
from clients.audit.episodes import Episode, tally
from clients.audit.subject import Subject

_SECTION = "difficulty"
_EXPERT_SOLVES = 0.8


async def audit_difficulty(subject: Subject) -> list[Entry]:
    """Play the expert, where there is one, and sum up."""
    why_not = await play_expert(subject)
    entries = []
    if why_not is not None:
        entries.append(Entry(_SECTION, "expert", Verdict.SKIPPED, why_not))
    else:
        entries.append(_expert(subject.played.get("expert", ())))
    return entries


def _expert(episodes: Sequence[Episode]) -> Entry:
    failed = next((each.problem for each in episodes if each.problem is not None), None)
    counted = tally(episodes)
    if counted is None:
        return Entry(
            _SECTION, "expert", Verdict.SKIPPED, str(failed or "no episode was played to its end in time")
        )
    short = counted.says and counted.rate.high < _EXPERT_SOLVES
    return Entry(
        _SECTION,
        "expert",
        Verdict.WARNING if short else Verdict.OK,
        str(counted),
        "the expert fails where it should show the way: look at its plan" if short else "",
        counted.numbers(),
    )


async def audit_lengths(subject: Subject) -> list[Entry]:
    """Say how long the episodes were that came to their end."""
    entries = []
    for policy in ("random", "expert"):
        lengths = sorted(each.steps for each in subject.played.get(policy, ()) if each.ended)
        if lengths:
            numbers = {
                "episodes": len(lengths),
                "shortest": lengths[0],
                "median": median(lengths),
                "p90": lengths[int(0.9 * (len(lengths) - 1))],
                "longest": lengths[-1],
            }
            detail = "{shortest} to {longest} steps, median {median:g}, 90 % within {p90}".format(**numbers)
            entries.append(Entry(_SECTION, f"length, {policy}", Verdict.OK, detail, "", numbers))
    return entries
