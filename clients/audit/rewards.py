"""Rewards: whether they are numbers in their range, and whether they agree with `success`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from rollgym.clients.audit.arena import Episode
from rollgym.clients.audit.card import CardEntry, CardVerdict
from rollgym.clients.audit.subject import Subject

_SECTION = "rewards"
_ENOUGH = 20
_ENOUGH_TO_TELL = 200
_NEAR = 1e-9


async def audit_rewards(subject: Subject) -> list[CardEntry]:
    """Look at the rewards of all that was played so far."""
    episodes = [each for each in subject.all_played() if each.steps]
    entries = [_finite(subject)]
    declared = _declared_range(subject)
    if declared is not None:
        entries.append(_in_range(subject, *declared))
    if not episodes:
        return entries
    knowing = bool(subject.example_replies or subject.played.get("expert"))
    varied = _varied(episodes, knowing=knowing)
    entries.append(varied)
    success = _success(episodes)
    # A constant reward never agrees with success; one report of it is enough.
    if success is not None and varied.verdict is not CardVerdict.FAILED:
        entries.append(success)
    return entries


def _finite(subject: Subject) -> CardEntry:
    watch = subject.watch
    where = watch.first("reward not finite")
    if where:
        return CardEntry(
            _SECTION,
            "finite",
            CardVerdict.FAILED,
            where,
            "return a finite float; report failures by an exception, not by NaN",
            {"not_finite": watch.count("reward not finite"), "steps": watch.steps},
        )
    if not watch.steps:
        return CardEntry(_SECTION, "finite", CardVerdict.SKIPPED, "no step was taken without a failure")
    return CardEntry(
        _SECTION,
        "finite",
        CardVerdict.OK,
        f"{watch.steps:,} rewards, from {watch.lowest:.4g} to {watch.highest:.4g}",
        numbers={"steps": watch.steps, "lowest": watch.lowest, "highest": watch.highest},
    )


def _declared_range(subject: Subject) -> tuple[float, float] | None:
    """Return the range of rewards that metadata declare; a verifier's score lies between 0 and 1."""
    declared = subject.env.metadata.get("reward_range")
    if isinstance(declared, (list, tuple)) and len(declared) == 2:
        low, high = (float(bound) for bound in declared)  # an infinite bound is text on the wire
        return low, high
    return (0.0, 1.0) if subject.env.stateless else None


def _in_range(subject: Subject, low: float, high: float) -> CardEntry:
    watch = subject.watch
    check, numbers = "in the declared range", {"low": low, "high": high}
    if watch.lowest < low - _NEAR or watch.highest > high + _NEAR:
        return CardEntry(
            _SECTION,
            check,
            CardVerdict.FAILED,
            f"paid from {watch.lowest:.4g} to {watch.highest:.4g}, declared from {low:g} to {high:g}",
            "scale the reward, or declare metadata['reward_range'] as it is",
            numbers,
        )
    return CardEntry(_SECTION, check, CardVerdict.OK, f"within {low:g} to {high:g}", numbers=numbers)


def _varied(episodes: Sequence[Episode], *, knowing: bool) -> CardEntry:
    """Check whether the return depends on the actions.

    Args:
        episodes: All that were played.
        knowing: Whether some were played as the author says, by an expert or with example replies.
    """
    check = "depends on the play"
    ended = [each for each in episodes if each.ended]
    returns = {round(each.total_reward, 9) for each in ended}
    step_rewards = {mark.reward for each in episodes for mark in each.marks[1:]}
    solved = {each.solved for each in ended}
    policies = {each.policy for each in ended}
    numbers = {"returns": len(returns), "policies": len(policies)}
    if not ended:
        return CardEntry(_SECTION, check, CardVerdict.SKIPPED, "no episode came to its end", numbers=numbers)
    # If an episode ends only when it is solved, all that end rightly earn the same.
    if len(returns) > 1 or (len(step_rewards) > 1 and len(solved) == 1):
        detail = f"{len(step_rewards)} different rewards, {len(returns)} different returns"
        return CardEntry(_SECTION, check, CardVerdict.OK, detail, "", numbers)
    detail = f"all {len(ended)} episodes of {len(policies)} policies are paid {next(iter(returns)):g}"
    if len(solved) > 1:
        return CardEntry(
            _SECTION,
            check,
            CardVerdict.FAILED,
            f"{detail}, solved or not",
            "pay what `success` says: a constant reward teaches nothing",
            numbers,
        )
    if len(ended) < _ENOUGH_TO_TELL:
        detail += ": constant, or sparse; so few do not tell"
        return CardEntry(_SECTION, check, CardVerdict.SKIPPED, detail, "", numbers)
    return CardEntry(
        _SECTION,
        check,
        CardVerdict.WARNING,
        detail,
        (
            "it is constant, or too sparse even for the expert or the example replies: nothing can be learned from "
            "equal returns"
            if knowing
            else "the audit's players did not find another reward, which says little of the environment: declare "
            "replies that make sense in metadata['example_replies']"
        ),
        numbers,
    )


def _success(episodes: Sequence[Episode]) -> CardEntry | None:
    check = "agrees with success"
    ended = [each for each in episodes if each.ended and each.marks[-1].success is not None]
    solved = [each.total_reward for each in ended if each.solved]
    unsolved = [each.total_reward for each in ended if not each.solved]
    policies = {each.policy for each in ended}
    if not ended:
        return None
    numbers = {
        "solved": len(solved),
        "unsolved": len(unsolved),
        "mean_return_solved": fmean(solved) if solved else None,
        "mean_return_unsolved": fmean(unsolved) if unsolved else None,
    }
    if not unsolved and len(ended) >= _ENOUGH and len(policies) > 2:
        return CardEntry(
            _SECTION,
            check,
            CardVerdict.FAILED,
            f"all {len(ended)} episodes of {len(policies)} policies end with success, those of who never reads too",
            "`success` says whether the task is solved, apart from the end of the episode",
            numbers,
        )
    if not solved:
        most = max(unsolved)
        return CardEntry(
            _SECTION,
            check,
            CardVerdict.OK,
            f"no episode was solved; the best was paid {most:.4g}",
            "",
            numbers,
        )
    if unsolved:
        better, worse = fmean(solved), fmean(unsolved)
        detail = f"return {better:.4g} where solved ({len(solved)}), {worse:.4g} where not ({len(unsolved)})"
        if better > worse + _NEAR:
            return CardEntry(_SECTION, check, CardVerdict.OK, detail, "", numbers)
        few = min(len(solved), len(unsolved)) < _ENOUGH // 4
        return CardEntry(
            _SECTION,
            check,
            CardVerdict.WARNING if few else CardVerdict.FAILED,
            detail,
            "success without reward, or reward without success: let both follow from the same condition",
            numbers,
        )
    detail = f"return {fmean(solved):.4g} where solved ({len(solved)}); nothing was left unsolved"
    verdict = CardVerdict.OK if not math.isclose(fmean(solved), 0.0) else CardVerdict.WARNING
    return CardEntry(
        _SECTION, check, verdict, detail, "" if verdict is CardVerdict.OK else "pay for success", numbers
    )
