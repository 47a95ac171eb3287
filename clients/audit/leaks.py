"""Leaks: whether a policy earns reward by repeating text of the observation or of the info."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollgym.clients.audit.arena import Game
from rollgym.clients.audit.card import Entry, Verdict
from rollgym.clients.audit.episodes import Tally, tally
from rollgym.clients.audit.extracts import Extract, extracts
from rollgym.clients.audit.policies import GiveUp, Player, Policy, random_policy
from rollgym.clients.audit.subject import Subject

_SECTION = "leaks"
_SAMPLE = 6
_SAMPLE_STEPS = 6
_SCREEN = 6
_PASSES_SCREEN = 4
_CONFIRM = 40
_MOST = 64
_COUNTS = 10
_ABOVE = 0.2
_MISSES = 3
"""So often in a row a place may hold nothing; a random action is taken then."""

Look = tuple[Any, Mapping[str, Any], int]


async def audit_leaks(subject: Subject) -> list[Entry]:
    """Repeat the contents of observations and infos as actions, place by place."""
    looks = await _sample(subject)
    if not looks:
        return [Entry(_SECTION, "answers", Verdict.SKIPPED, "no episode could be played without a failure")]
    told = _tasks_told(subject, looks)
    candidates = _candidates(subject, looks)
    if not any(mark.success is not None for each in subject.all_played() for mark in each.marks):
        detail = 'info["success"] never says what is solved, so what is said back cannot be judged'
        return [*told, Entry(_SECTION, "answers", Verdict.SKIPPED, detail)]
    bar = _bar(subject)
    tried, promising = await _screen(subject, candidates)
    found = []
    for extract in promising:
        confirmed = await _confirm(subject, extract)
        if confirmed is not None and confirmed.rate.low > bar:
            found.append((extract, confirmed))
    return [*told, *_entries(tried, len(candidates), found)]


def _tasks_told(subject: Subject, looks: Sequence[Look]) -> list[Entry]:
    """Check that a reset of a verifier does not reveal the task's fields, one of which is the answer."""
    if subject.env.kind != "stateless":
        return []
    resets = [look[1] for look in looks if look[2] == 0]
    places = sorted({place for info in resets for place in _tasks_in(info, "info")})
    check = "task at the reset"
    if not places:
        return [Entry(_SECTION, check, Verdict.OK, f"{len(resets)} resets tell nothing of it but the prompt")]
    remedy = "a task holds its answer: tell it only where the reset's option `expert` asks for it"
    return [
        Entry(_SECTION, check, Verdict.FAILED, f"{places[0]} holds its fields", remedy, {"places": places})
    ]


def _tasks_in(value: Any, place: str) -> list[str]:
    if not isinstance(value, Mapping):
        return []
    found = []
    for key, each in value.items():
        if key == "task" and isinstance(each, Mapping) and each:
            found.append(f"{place}[{key!r}]")
        found += _tasks_in(each, f"{place}[{key!r}]")
    return found


async def _sample(subject: Subject) -> list[Look]:
    """Play a few random steps; return the observations and infos."""
    looks: list[Look] = []
    policy = random_policy(subject.action_space, subject.wording)

    def begin(seed: int) -> Player:
        play = policy.begin(seed)
        step = -1

        def see(observation: Any, info: Mapping[str, Any]) -> Any:
            nonlocal step
            step += 1
            looks.append((observation, info, step))
            return play(observation, info)

        return see

    games = subject.games(Policy("random", begin), "leak sample", _SAMPLE)
    await subject.arena().play(games, max_steps=_SAMPLE_STEPS)
    return looks


def _candidates(subject: Subject, looks: Sequence[Look]) -> list[Extract]:
    """Return the places that hold actions, one of each that hold the same, and none that hold always the same."""
    resets = [look for look in looks if look[2] == 0]
    told = {look[1].get("instruction") for look in resets if isinstance(look[1].get("instruction"), str)}
    places: dict[str, Extract] = {}
    for observation, info, _ in looks:
        for extract in extracts(
            subject.action_space, observation, info, subject.wording, reads_instruction=len(told) > 1
        ):
            places.setdefault(extract.name, extract)
    chosen: dict[tuple[str, ...], Extract] = {}
    for extract in places.values():
        values = tuple(repr(extract.read(*look)) for look in looks)
        if len(set(values)) == 1:
            continue  # a constant, which the baselines have played
        kept = chosen.get(values)
        if kept is None or (kept.apart and not extract.apart):
            chosen[values] = extract
    return list(chosen.values())[:_MOST]


def _policy(subject: Subject, extract: Extract) -> Policy:
    otherwise = random_policy(subject.action_space, subject.wording)

    def begin(seed: int) -> Player:
        fall_back = otherwise.begin(seed)
        step, missed = -1, 0

        def play(observation: Any, info: Mapping[str, Any]) -> Any:
            nonlocal step, missed
            step += 1
            action = extract.read(observation, info, step)
            if action is not None:
                missed = 0
                return action
            missed += 1
            if missed > _MISSES:
                raise GiveUp
            return fall_back(observation, info)

        return play

    return Policy(f"said back: {extract.name}", begin)


async def _screen(subject: Subject, candidates: Sequence[Extract]) -> tuple[int, list[Extract]]:
    """Return how many were tried in time, and those of them that are worth a closer look."""
    seeds = subject.seeds("leak screen", _SCREEN)
    games = [Game(_policy(subject, extract), seed) for extract in candidates for seed in seeds]
    episodes = await subject.arena().play(
        games, width=128, deadline=subject.budget.share(0.2), leave_invalid=4
    )
    solved: dict[str, int] = {}
    for episode in episodes:
        solved[episode.policy] = solved.get(episode.policy, 0) + episode.solved
    promising = [each for each in candidates if solved.get(_policy(subject, each).name, 0) >= _PASSES_SCREEN]
    return len(episodes) // _SCREEN, promising


async def _confirm(subject: Subject, extract: Extract) -> Tally | None:
    episodes = await subject.arena().play(
        subject.games(_policy(subject, extract), "leak", _CONFIRM), deadline=subject.budget.share(0.1)
    )
    subject.keep(episodes)
    return tally(episodes)


def _bar(subject: Subject) -> float:
    """Return a success rate that no policy reaches without reading the observation."""
    rates = [_ABOVE]
    for name, episodes in subject.played.items():
        found = None if name == "expert" or name.startswith("echo") else tally(episodes)
        # Fewer have intervals so wide that nothing would be above them.
        if found is not None and found.episodes >= _COUNTS:
            rates.append(found.rate.high)
    return max(rates)


def _entries(tried: int, known: int, found: Sequence[tuple[Extract, Tally]]) -> list[Entry]:
    seen = [each for each in found if not each[0].apart]
    apart = [each for each in found if each[0].apart]
    in_observation = [each for each in seen if not each[0].name.startswith("info")]
    in_info = [each for each in seen if each[0].name.startswith("info")]
    entries = []
    for check, group, verdict, remedy in (
        (
            "answer in the observation",
            in_observation,
            Verdict.FAILED,
            "a policy that copies from there solves the task: take it out of what the policy sees",
        ),
        (
            "answer in info",
            in_info,
            Verdict.FAILED,
            "whoever shows infos to a policy gives the answer away: take it out",
        ),
        (
            'answer in info["state"]',
            apart,
            Verdict.FAILED,
            "whoever plays gets it with each answer of the server: tell it only where the option `expert` asks for it",
        ),
    ):
        if not group:
            continue
        extract, counted = group[0]
        more = f", and {len(group) - 1} other places" if len(group) > 1 else ""
        entries.append(
            Entry(
                _SECTION,
                check,
                verdict,
                f"{extract.name}, said back: {counted}{more}",
                remedy,
                counted.numbers() | {"places": [each[0].name for each in group]},
            )
        )
    if not entries:
        numbers = {"places_tried": tried, "places": known}
        of_all = str(tried) if tried == known else f"{tried} of {known}, in time"
        detail = f"none of the places ({of_all}) in observation and info is paid when said back"
        verdict = Verdict.OK if tried or not known else Verdict.SKIPPED
        entries.append(Entry(_SECTION, "answers", verdict, detail, numbers=numbers))
    return entries
