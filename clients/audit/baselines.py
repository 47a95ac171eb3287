"""Baselines: the returns of random, blind and echoing policies; and the expert."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from rollgym.clients.audit.arena import Episode, PlannedEpisode, Tally, tally
from rollgym.clients.audit.card import CardEntry, CardVerdict
from rollgym.clients.audit.policies import (
    AuditPolicy,
    constant_policy,
    constants,
    echo_policy,
    examples_policy,
    expert_policy,
    listed_actions,
    random_policy,
    script_policy,
    takes_text,
)
from rollgym.clients.audit.subject import Subject
from rollgym.clients.checks.declared import BASELINES_REMEDY, Baseline, declared_baselines
from rollgym.clients.measuring.statistics import success_rate
from rollgym.clients.protocol.errors import ProblemError

_SECTION = "baselines"
_SCREEN = 10
_SCRIPTS = 8
_SOLVED_BLINDLY = 0.5
_PAID = 0.2
_GIVE_UP_INVALID = 20
_ROUNDED = 0.005
_SOLVERS = ("expert", "example replies", "random")


async def audit_baselines(subject: Subject) -> list[CardEntry]:
    """Play without reading, and measure the return."""
    random = await _play(
        subject, random_policy(subject.action_space, subject.wording), subject.settings.episodes
    )
    entries = [_entry("random", random, None)]
    if subject.example_replies:
        entries.append(_entry("example replies", await _examples(subject), None))
    entries.append(await _constant(subject, random))
    if takes_text(subject.action_space):
        empty = await _play(subject, constant_policy("", "empty"), _fewer(subject))
        entries.append(_entry("empty reply", empty, random))
    entries.extend(await _echoes(subject, random))
    entries.append(await _blind(subject, random))
    return entries + _as_declared(subject, entries)


async def play_expert(subject: Subject) -> str | None:
    """Play the environment's expert, and keep its episodes; if that is impossible, return the reason."""
    if not subject.env.metadata.get("expert"):
        return "it has no expert"
    policy = expert_policy(subject.wording)
    async with subject.arena().sessions(1) as (session,):
        try:
            await session.reset(0, policy.options)
        except ProblemError as problem:
            if problem.code != "forbidden":
                return str(problem)
            return "the server gives no expert actions (roll-serve --allow-expert lets it)"
    episodes = await subject.arena().play(
        subject.games(policy, "expert", subject.settings.episodes), deadline=subject.budget.share(0.2)
    )
    subject.keep(episodes)
    return None


async def _play(subject: Subject, policy: AuditPolicy, count: int, name: str = "baseline") -> Tally | None:
    episodes = await subject.arena().play(
        subject.games(policy, name, count),
        deadline=subject.budget.share(0.1),
        leave_invalid=_GIVE_UP_INVALID,
    )
    subject.keep(episodes)
    return tally(episodes)


async def _examples(subject: Subject) -> Tally | None:
    return await _play(subject, examples_policy(subject.example_replies), subject.settings.episodes)


def _fewer(subject: Subject) -> int:
    return max(min(_SCREEN, subject.settings.episodes), subject.settings.episodes // 2)


async def _constant(subject: Subject, random: Tally | None) -> CardEntry:
    """Find the best action to do always, and play it on seeds that were not used for the choice."""
    listed = listed_actions(subject.first_info)
    candidates = constants(subject.action_space, listed, subject.wording, subject.example_replies)
    best = await _best(subject, candidates, "constant choice")
    if best is None:
        return _entry("constant action", None, random)
    played = await _play(subject, best, subject.settings.episodes)
    return _entry("constant action", played, random, f"best of {len(candidates)}, {best.name}")


async def _best(subject: Subject, policies: Sequence[AuditPolicy], stream: str) -> AuditPolicy | None:
    """Return the policy that does best on a few seeds."""
    seeds = subject.seeds(stream, min(_SCREEN, max(4, subject.settings.episodes // 2)))
    games = [PlannedEpisode(policy, seed) for policy in policies for seed in seeds]
    episodes = await subject.arena().play(
        games, deadline=subject.budget.share(0.15), leave_invalid=_GIVE_UP_INVALID
    )
    subject.keep(episodes)
    best: tuple[tuple[int, float], AuditPolicy] | None = None
    for policy in policies:
        found = tally([each for each in episodes if each.policy == policy.name])
        if found is not None and (best is None or (found.solved, found.mean_return) > best[0]):
            best = ((found.solved, found.mean_return), policy)
    return None if best is None else best[1]


async def _echoes(subject: Subject, random: Tally | None) -> list[CardEntry]:
    space = subject.action_space
    policies = {"echo": echo_policy(space, lambda observation, info: observation, "echo of the observation")}
    if takes_text(space):
        policies["echo of the instruction"] = echo_policy(
            space, lambda observation, info: info.get("instruction"), "echo of the instruction"
        )
    entries = []
    for check, policy in policies.items():
        played = await _play(subject, policy, _fewer(subject))
        if played is not None:
            entries.append(_entry(check, played, random))
    return entries


async def _blind(subject: Subject, random: Tally | None) -> CardEntry:
    """Take the sequences that solved some task, and play the best of them on others."""
    solved = [each for group in _SOLVERS for each in subject.played.get(group, ()) if each.solved]
    sequences: Counter[tuple[object, ...]] = Counter()
    lasting: dict[tuple[object, ...], Episode] = {}
    for episode in solved:
        key = tuple(map(repr, episode.actions))
        sequences[key] += 1
        lasting.setdefault(key, episode)
    policies = [
        script_policy(lasting[key].actions, f"blind {number}")
        for number, (key, _) in enumerate(sequences.most_common(_SCRIPTS))
    ]
    if not policies:
        return CardEntry(
            _SECTION, "blind", CardVerdict.SKIPPED, "no sequence of actions is known that solves any task"
        )
    best = await _best(subject, policies, "blind choice")
    if best is None:
        return _entry("blind", None, random)
    played = await _play(subject, best, subject.settings.episodes, "blind")
    return _entry("blind", played, random, "one sequence")


def _entry(check: str, played: Tally | None, random: Tally | None, who: str = "") -> CardEntry:
    if played is None:
        return CardEntry(_SECTION, check, CardVerdict.SKIPPED, "no episode was played to its end in time")
    detail = f"{who}: {played}" if who else str(played)
    verdict, remedy = CardVerdict.OK, ""
    rate = played.rate
    above_random = random is None or rate.low > random.rate.high
    if check == "blind" and rate.low >= _SOLVED_BLINDLY:
        verdict = CardVerdict.WARNING
        remedy = (
            "one sequence of actions, whatever is seen, solves most tasks: let the tasks of different seeds differ, "
            "or judge a policy by how far it is above this"
        )
    elif check in ("constant action", "empty reply", "echo", "echo of the instruction"):
        remedy = "who reads nothing must not be paid: see what the reward and `success` are decided by"
        if rate.low >= _SOLVED_BLINDLY:
            verdict = CardVerdict.FAILED
        elif rate.low >= _PAID and above_random:
            verdict = CardVerdict.WARNING
        else:
            remedy = ""
    elif check in ("random", "example replies") and rate.low >= _SOLVED_BLINDLY:
        verdict = CardVerdict.WARNING
        remedy = "tasks that are solved at random teach little: make them harder"
    return CardEntry(
        _SECTION, check, verdict, detail, remedy, played.numbers() | ({"policy": who} if who else {})
    )


def _as_declared(subject: Subject, entries: Sequence[CardEntry]) -> list[CardEntry]:
    """Compare what was played with the baselines that the environment declares for its default kwargs."""
    check = "as declared"
    try:
        declared = {} if subject.kwargs else declared_baselines(subject.env.metadata)
    except ValueError as error:
        return [CardEntry(_SECTION, check, CardVerdict.FAILED, str(error), BASELINES_REMEDY)]
    played = {entry.check: entry.numbers for entry in entries if entry.numbers}
    if expert := tally(subject.played.get("expert", ())):
        played["expert"] = expert.numbers()
    compared = {player: played[player] for player in declared if player in played}
    if not compared:
        return []
    different = [
        f"{player} solves {numbers['rate']:.3g} with a mean return of {numbers['mean_return']:.3g}"
        for player, numbers in compared.items()
        if _differ(declared[player], numbers)
    ]
    if different:
        remedy = "either the environment has changed by mistake, or metadata['baselines'] has to"
        return [CardEntry(_SECTION, check, CardVerdict.WARNING, "; ".join(different), remedy)]
    return [CardEntry(_SECTION, check, CardVerdict.OK, ", ".join(compared))]


def _differ(declared: Baseline, played: Mapping[str, float]) -> bool:
    """Whether the intervals of a declared baseline and of one that was played have nothing in common."""
    episodes = int(played["episodes"])
    rate = success_rate(round(declared.solved * episodes), episodes)
    # Episodes that all paid the same do not say how far returns are spread: the width is 0.
    width = played["return_high"] - played["return_low"]
    apart = abs(declared.mean_return - played["mean_return"]) - _ROUNDED * abs(declared.mean_return)
    return rate.low > played["rate_high"] or played["rate_low"] > rate.high or 0 < width < apart


_DIFFICULTY = "difficulty"
_EXPERT_SOLVES = 0.8


async def audit_difficulty(subject: Subject) -> list[CardEntry]:
    """Play the expert, if the environment has one, and summarize the difficulty."""
    why_not = await play_expert(subject)
    entries = []
    if why_not is not None:
        entries.append(CardEntry(_DIFFICULTY, "expert", CardVerdict.SKIPPED, why_not))
    else:
        entries.append(_expert(subject.played.get("expert", ())))
    return entries


def _expert(episodes: Sequence[Episode]) -> CardEntry:
    failed = next((each.problem for each in episodes if each.problem is not None), None)
    counted = tally(episodes)
    if counted is None:
        return CardEntry(
            _DIFFICULTY,
            "expert",
            CardVerdict.SKIPPED,
            str(failed or "no episode was played to its end in time"),
        )
    short = counted.says and counted.rate.high < _EXPERT_SOLVES
    return CardEntry(
        _DIFFICULTY,
        "expert",
        CardVerdict.WARNING if short else CardVerdict.OK,
        str(counted),
        "the expert fails where it should show the way: look at its plan" if short else "",
        counted.numbers(),
    )


async def audit_lengths(subject: Subject) -> list[CardEntry]:
    """Say how long the episodes were that came to their end."""
    entries = []
    for policy in ("random", "example replies", "expert"):
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
            entries.append(CardEntry(_DIFFICULTY, f"length, {policy}", CardVerdict.OK, detail, "", numbers))
    return entries
