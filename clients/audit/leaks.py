"""Leaks: whether a policy earns reward by repeating text of the observation or of the info, where an answer may lie."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from rollgym.clients.audit.arena import PlannedEpisode, Tally, tally
from rollgym.clients.audit.card import CardEntry, CardVerdict
from rollgym.clients.audit.policies import (
    ActionWording,
    AuditPolicy,
    GiveUp,
    Player,
    random_policy,
    takes_text,
)
from rollgym.clients.audit.subject import Subject

_MAX_TEXT = 500
_LONGEST_READ = 20_000
_MAX_ITEMS = 12
_MAX_DEPTH = 6
_ENDS = 6
_NAMED = re.compile(
    r"(?:answer|solution|target|goal|secret|key|label|correct|expected|reference)\w*+\W+(\S+)", re.IGNORECASE
)
_APART = frozenset({"state", "anchor", "metrics"})
"""Keys of info that the protocol hides from policies."""
_NO_ANSWERS = frozenset(
    {"success", "action_is_valid", "format_penalty", "env_reward", "metrics", "instruction"}
)

Read = Callable[[Any, Mapping[str, Any], int], Any]


@dataclass(frozen=True)
class Extract:
    """A way to find an action in an answer of the server.

    Attributes:
        name: The place of the action, for people.
        apart: Whether the protocol hides that place from policies.
        read: Returns the action for an observation, an info and the number of the step; None if it finds none.
    """

    name: str
    apart: bool
    read: Read


def extracts(
    space: Space[Any],
    observation: Any,
    info: Mapping[str, Any],
    wording: ActionWording,
    *,
    reads_instruction: bool,
) -> list[Extract]:
    """Return all places of this observation and info that may hold an action.

    Args:
        space: The action space.
        observation: The observation of a reset.
        info: The info of the same reset.
        wording: The form of texts.
        reads_instruction: Whether the instruction differs between tasks, so that it may hold an answer.
    """
    found = []
    for name, path in _leaves(info, ()):
        if path[0] in _NO_ANSWERS or (path[0] == "available_actions" and path[1:] not in ((0,), (-1,))):
            continue
        read = _at_path(path)
        apart = path[0] in _APART
        found.append(Extract(f"info{name}", apart, _acting(space, wording, read)))
        found.append(
            Extract(f"info{name}, one after the other", apart, _acting(space, wording, _by_step(read)))
        )
    if isinstance(observation, str):
        found += _text_extracts("the observation", space, wording, lambda seen, _info, _step: seen)
    else:
        for name, path in _leaves(observation, ()):
            read = _at_path(path, in_observation=True)
            found.append(Extract(f"observation{name}", False, _acting(space, wording, read)))
    if reads_instruction:
        found += _text_extracts(
            "the instruction", space, wording, lambda _seen, info, _step: info.get("instruction")
        )
    return found


def _text_extracts(where: str, space: Space[Any], wording: ActionWording, text: Read) -> Iterator[Extract]:
    def words(pattern: str, index: int) -> Read:
        compiled = re.compile(pattern)

        def read(observation: Any, info: Mapping[str, Any], step: int) -> Any:
            found = compiled.findall(str(text(observation, info, step))[:_LONGEST_READ])
            return found[index] if -len(found) <= index < len(found) else None

        return read

    def named(observation: Any, info: Mapping[str, Any], step: int) -> Any:
        found = _NAMED.findall(str(text(observation, info, step))[:_LONGEST_READ])
        return found[-1].strip("\"'.,;:()[]<>") if found else None

    yield Extract(f"what {where} calls answer, target or the like", False, _acting(space, wording, named))
    for kind, pattern, count in (
        ("word", r"\w+", _ENDS),
        ("number", r"-?\d+(?:\.\d+)?", 3),
        ("line", r"[^\n]+", 2),
    ):
        for index in (*range(count), *range(-count, 0)):
            from_end = f"{kind} {index + 1}" if index >= 0 else f"{kind} {-index} from the end"
            yield Extract(f"{from_end} of {where}", False, _acting(space, wording, words(pattern, index)))


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Give each place in nested data that holds a scalar, a short text or a list of them."""
    if len(path) > _MAX_DEPTH:
        return
    name = "".join(f"[{part!r}]" for part in path)
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, (*path, key))
    elif isinstance(value, np.ndarray):
        if value.ndim == 0 or value.size <= _MAX_ITEMS:
            yield name, path
        if value.ndim == 1:
            for index in range(min(len(value), _MAX_ITEMS)):
                yield f"{name}[{index}]", (*path, index)
    elif isinstance(value, (list, tuple)):
        if path:
            yield name, path
        for index in (*range(min(len(value), _MAX_ITEMS)), -1):
            if -len(value) <= index < len(value):
                yield from _leaves(value[index], (*path, index))
    elif isinstance(value, str):
        if len(value) <= _MAX_TEXT:
            yield name, path
    elif isinstance(value, (int, float, np.integer, np.floating)):
        yield name, path


def _at_path(path: Sequence[Any], *, in_observation: bool = False) -> Read:
    def read(observation: Any, info: Mapping[str, Any], _step: int) -> Any:
        value: Any = observation if in_observation else info
        for part in path:
            if isinstance(value, Mapping):
                value = value.get(part)
            elif isinstance(value, (list, tuple, np.ndarray)) and isinstance(part, int):
                value = value[part] if -len(value) <= part < len(value) else None
            else:
                return None
        return value

    return read


def _by_step(read: Read) -> Read:
    """Read the place as a list, or as words, and return the element of the step."""

    def one(observation: Any, info: Mapping[str, Any], step: int) -> Any:
        value = read(observation, info, step)
        if isinstance(value, str):
            value = re.findall(r"[\w.+-]+", value)
        if not isinstance(value, (list, tuple)) or len(value) < 2:
            return None
        return value[step] if step < len(value) else None

    return one


def _acting(space: Space[Any], wording: ActionWording, read: Read) -> Read:
    """Turn the text found into an action of the space; None if it is not one."""

    def act(observation: Any, info: Mapping[str, Any], step: int) -> Any:
        value = read(observation, info, step)
        if value is None or isinstance(value, bool):
            return None
        if takes_text(space):
            if isinstance(value, (str, int, float, np.integer, np.floating)):
                return wording.write(str(value))
            return None
        if isinstance(space, spaces.Discrete):
            return _whole(value) if _whole(value) in space else None
        fits = isinstance(value, np.ndarray) and value.shape == space.shape and value in space
        return value if fits else None

    return act


def _whole(value: Any) -> int | None:
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"-?\d{1,9}", value) else None
    if isinstance(value, np.ndarray):
        if value.size != 1:
            return None
        value = value.item()
    if not isinstance(value, (int, float, np.integer, np.floating)):
        return None
    number = float(value)
    return int(number) if abs(number) < 2**53 and number.is_integer() else None


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


async def audit_leaks(subject: Subject) -> list[CardEntry]:
    """Repeat the contents of observations and infos as actions, place by place."""
    looks = await _sample(subject)
    if not looks:
        return [
            CardEntry(
                _SECTION, "answers", CardVerdict.SKIPPED, "no episode could be played without a failure"
            )
        ]
    told = _tasks_told(subject, looks)
    candidates = _candidates(subject, looks)
    if not any(mark.success is not None for each in subject.all_played() for mark in each.marks):
        detail = 'info["success"] never says what is solved, so what is said back cannot be judged'
        return [*told, CardEntry(_SECTION, "answers", CardVerdict.SKIPPED, detail)]
    bar = _bar(subject)
    tried, promising = await _screen(subject, candidates)
    found = []
    for extract in promising:
        confirmed = await _confirm(subject, extract)
        if confirmed is not None and confirmed.rate.low > bar:
            found.append((extract, confirmed))
    return [*told, *_entries(tried, len(candidates), found)]


def _tasks_told(subject: Subject, looks: Sequence[Look]) -> list[CardEntry]:
    """Check that a reset of a verifier does not reveal the task's fields, one of which is the answer."""
    if not subject.env.stateless:
        return []
    resets = [look[1] for look in looks if look[2] == 0]
    places = sorted({place for info in resets for place in _tasks_in(info, "info")})
    check = "task at the reset"
    if not places:
        return [
            CardEntry(
                _SECTION, check, CardVerdict.OK, f"{len(resets)} resets tell nothing of it but the prompt"
            )
        ]
    remedy = "a task holds its answer: tell it only where the reset's option `expert` asks for it"
    return [
        CardEntry(
            _SECTION, check, CardVerdict.FAILED, f"{places[0]} holds its fields", remedy, {"places": places}
        )
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

    games = subject.games(AuditPolicy("random", begin), "leak sample", _SAMPLE)
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


def _policy(subject: Subject, extract: Extract) -> AuditPolicy:
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

    return AuditPolicy(f"said back: {extract.name}", begin)


async def _screen(subject: Subject, candidates: Sequence[Extract]) -> tuple[int, list[Extract]]:
    """Return how many were tried in time, and those of them that are worth a closer look."""
    seeds = subject.seeds("leak screen", _SCREEN)
    games = [PlannedEpisode(_policy(subject, extract), seed) for extract in candidates for seed in seeds]
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


def _entries(tried: int, known: int, found: Sequence[tuple[Extract, Tally]]) -> list[CardEntry]:
    seen = [each for each in found if not each[0].apart]
    apart = [each for each in found if each[0].apart]
    in_observation = [each for each in seen if not each[0].name.startswith("info")]
    in_info = [each for each in seen if each[0].name.startswith("info")]
    entries = []
    for check, group, verdict, remedy in (
        (
            "answer in the observation",
            in_observation,
            CardVerdict.FAILED,
            "a policy that copies from there solves the task: take it out of what the policy sees",
        ),
        (
            "answer in info",
            in_info,
            CardVerdict.FAILED,
            "whoever shows infos to a policy gives the answer away: take it out",
        ),
        (
            'answer in info["state"]',
            apart,
            CardVerdict.FAILED,
            "whoever plays gets it with each answer of the server: tell it only where the option `expert` asks for it",
        ),
    ):
        if not group:
            continue
        extract, counted = group[0]
        more = f", and {len(group) - 1} other places" if len(group) > 1 else ""
        entries.append(
            CardEntry(
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
        verdict = CardVerdict.OK if tried or not known else CardVerdict.SKIPPED
        entries.append(CardEntry(_SECTION, "answers", verdict, detail, numbers=numbers))
    return entries
