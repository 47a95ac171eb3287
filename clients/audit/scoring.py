"""Scoring: the responses that a verifier pays for, and whether a verdict depends on the item alone.

Tasks are drawn from the verifier, and scored with the answers that it pays in full.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollgym.clients.audit.arena import Arena, PlannedEpisode, Watch
from rollgym.clients.audit.card import CardEntry, CardVerdict
from rollgym.clients.audit.policies import WORDINGS, AuditPolicy, GiveUp, Player
from rollgym.clients.audit.subject import Subject
from rollgym.clients.measuring.statistics import success_rate
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import VerdictReply as Score

_FULL = 1.0 - 1e-6
"""A score from here on is one in full."""
_MOST_TASKS = 60
_ANSWER_NAMES = frozenset({"answer", "solution", "target", "reference", "expected", "label", "ground_truth"})


@dataclass(frozen=True)
class ScoredTask:
    """A task with its prompt and instruction; the answer is a text that earns the full score, if one is known.

    `told` is the info of a reset to the same task without the option `expert`, if there was one.
    """

    fields: Mapping[str, Any]
    prompt: str = ""
    instruction: str = ""
    answer: str | None = None
    field: str | None = None
    told: Mapping[str, Any] | None = None
    seed: int | None = None


async def _draw_tasks(subject: Subject) -> list[ScoredTask]:
    """Return the given tasks, or those that resets draw and show if asked for the expert."""
    if subject.settings.items:
        return [ScoredTask(dict(fields)) for fields in subject.settings.items[:_MOST_TASKS]]
    seeds = subject.seeds("tasks", min(_MOST_TASKS, max(20, subject.settings.episodes)))
    told = await _resets(seeds, subject.arena(), None)
    # A server that shows no tasks, or a verifier without that option, is not at fault.
    unwatched = Arena(subject.client, subject.env.env_id, subject.kwargs, Watch(), 1)
    asked = await _resets(seeds, unwatched, {"expert": True})
    tasks = []
    for seed, (observation, info) in (asked or told).items():
        state = info.get("state")
        fields = state.get("task") if isinstance(state, Mapping) else None
        if isinstance(fields, Mapping) and fields:
            instruction = str(info.get("instruction", ""))
            before = told.get(seed, ("", {}))[1]
            tasks.append(ScoredTask(dict(fields), observation, instruction, told=before, seed=seed))
    return tasks


async def _resets(
    seeds: Sequence[int], arena: Arena, options: Mapping[str, Any] | None
) -> dict[int, tuple[str, Mapping[str, Any]]]:
    """Return observation and info of resets, by seed."""
    seen: dict[int, tuple[str, Mapping[str, Any]]] = {}

    def begin(seed: int) -> Player:
        def see(observation: Any, info: Mapping[str, Any]) -> Any:
            seen[seed] = str(observation), info
            raise GiveUp

        return see

    policy = AuditPolicy("tasks", begin, options)
    await arena.play([PlannedEpisode(policy, seed) for seed in seeds])
    return {seed: seen[seed] for seed in seeds if seed in seen}


async def _score_all(subject: Subject, items: Sequence[tuple[ScoredTask, str]]) -> list[Score]:
    """Score responses, each to its task."""
    return await subject.client.verify(
        subject.env.env_id, [{**task.fields, "response": response} for task, response in items]
    )


async def _with_answers(subject: Subject, tasks: Sequence[ScoredTask]) -> list[ScoredTask]:
    """Find the field that, said as the response, is paid in full: the reference answer."""
    best: tuple[int, str] | None = None
    for name in sorted(_fields_to_say(tasks[0]), key=lambda name: name not in _ANSWER_NAMES):
        for wording in WORDINGS[:3]:
            said = [(task, str(wording.write(str(task.fields.get(name, ""))))) for task in tasks]
            paid = sum(score.score >= _FULL for score in await _score_all(subject, said))
            if best is None or paid > best[0]:
                best = paid, name
    if best is None or best[0] < 0.8 * len(tasks):
        return list(tasks)
    _, name = best
    return [replace(task, answer=str(task.fields[name]), field=name) for task in tasks if name in task.fields]


def _fields_to_say(task: ScoredTask) -> list[str]:
    """Return the fields that can be said."""
    return [
        name
        for name, value in task.fields.items()
        if isinstance(value, (str, int, float)) and not isinstance(value, bool)
    ]


def _fields_said(tasks: Sequence[ScoredTask]) -> list[list[tuple[ScoredTask, str]]]:
    """Say back each field of the task that is not its answer."""
    names = [
        name for name, value in tasks[0].fields.items() if isinstance(value, str) and name != tasks[0].field
    ]
    return [[(task, str(task.fields.get(name, ""))) for task in tasks] for name in names]


_SECTION = "verifier"
_OUTCOMES = ("correct", "wrong", "partial", "unparsable", "timeout", "error")
_NOT_OURS = ("timeout", "error")
_PAID = 0.05
_CONSTANTS = ("0", "1", "2", "10", "42", "A", "B", "yes", "no", "true", "correct", "I do not know.")
_HEDGES: Mapping[str, Callable[[Sequence[str]], str]] = {
    "or": lambda answers: " or ".join(answers),
    "lines": lambda answers: "\n".join(answers),
    "tags": lambda answers: "".join(f"<answer>{answer}</answer>" for answer in answers),
    "one tag": lambda answers: f"<answer>{' or '.join(answers)}</answer>",
    "boxes": lambda answers: " ".join(f"\\boxed{{{answer}}}" for answer in answers),
    "fences": lambda answers: "\n".join(f"```\n{answer}\n```" for answer in answers),
}
# An answer of several lines is a text or a program: one below the other they make one longer text, in which a program
# has more definitions than it needs, and not a list of answers that exclude each other.
_ONE_LINE_EACH = frozenset({"lines"})


async def audit_scoring(subject: Subject) -> list[CardEntry]:
    """Score worthless and hedging responses, and the same items in other batches."""
    if not subject.env.stateless:
        return []
    tasks = await _draw_tasks(subject)
    if not tasks:
        return [
            CardEntry(
                _SECTION,
                "tasks",
                CardVerdict.SKIPPED,
                "the server shows no task fields in info['state']['task'], so nothing can be scored",
                "let it (roll-serve --allow-expert), or name tasks in a file: --items FILE, one JSON object of task "
                "fields a line",
            )
        ]
    try:
        # First, before any item was scored: a verifier that keeps state shows it here.
        company = await _company(subject, tasks)
        tasks = await _with_answers(subject, tasks)
        entries = [
            *await _undeserved(subject, tasks),
            *await _hedging(subject, tasks),
            company,
            *await _reference(subject, tasks),
            *_told(tasks),
        ]
        await _play_answers(subject, tasks)
    except ProblemError as problem:
        return [
            CardEntry(
                _SECTION, "scores", CardVerdict.FAILED, str(problem), "a verifier answers every response"
            )
        ]
    return entries


async def _undeserved(subject: Subject, tasks: Sequence[ScoredTask]) -> list[CardEntry]:
    """Score replies that cannot come from work on the task."""
    groups: dict[str, list[list[tuple[ScoredTask, str]]]] = {
        "empty reply": [[(task, text) for task in tasks] for text in ("", " ", "\n", "<answer></answer>")],
        "constant reply": [[(task, text) for task in tasks] for text in _CONSTANTS],
        "echo": [
            [(task, task.prompt) for task in tasks if task.prompt],
            [(task, task.instruction) for task in tasks if task.instruction],
            [(task, f"{task.instruction}\n{task.prompt}") for task in tasks if task.prompt],
            *_fields_said(tasks),
        ],
    }
    entries, oddities = [], _Oddities()
    for check, variants in groups.items():
        highest, said, count = -1, "", 1
        for variant in (each for each in variants if each):
            scores = await _score_all(subject, variant)
            oddities.look_at(variant, scores)
            paid = sum(score.score >= 0.5 for score in scores)
            if highest < 0 or paid * count > highest * len(variant):
                highest, said, count = paid, variant[0][1], len(variant)
        if highest >= 0:
            entries.append(_undeserved_entry(check, highest, count, said))
    if tasks[0].answer is not None:
        right = [(task, str(task.answer)) for task in tasks]
        oddities.look_at(right, await _score_all(subject, right))
    return [*entries, *oddities.entries()]


class _Oddities:
    """Scores that are invalid for any response: the first of each kind."""

    def __init__(self) -> None:
        self._out_of_range = ""
        self._outcome = ""

    def look_at(self, said: Sequence[tuple[ScoredTask, str]], scores: Sequence[Score]) -> None:
        """Check the scores of responses."""
        for (_, response), score in zip(said, scores, strict=True):
            if not math.isfinite(score.score) or not -1e-9 <= score.score <= 1.0 + 1e-9:
                self._out_of_range = self._out_of_range or f"{response[:40]!r} is scored {score.score}"
            self._outcome = self._outcome or _odd(score, response)

    def entries(self) -> list[CardEntry]:
        """Return the entries for the scores seen."""
        return [
            CardEntry(
                _SECTION,
                "scores in [0, 1]",
                CardVerdict.FAILED,
                self._out_of_range,
                "scale the score to between 0 and 1",
            )
            if self._out_of_range
            else CardEntry(_SECTION, "scores in [0, 1]", CardVerdict.OK),
            CardEntry(
                _SECTION,
                "outcomes",
                CardVerdict.FAILED,
                self._outcome,
                f"`correct` is paid in full and `wrong` nothing; the outcomes are {', '.join(_OUTCOMES)}",
            )
            if self._outcome
            else CardEntry(_SECTION, "outcomes", CardVerdict.OK, "they agree with the scores"),
        ]


def _odd(score: Score, response: str) -> str:
    """Return the fault of an outcome, or an empty text."""
    if score.outcome not in _OUTCOMES:
        return f"{response[:40]!r} has the outcome {score.outcome!r}"
    if score.outcome in _NOT_OURS:
        return f"{response[:40]!r} ends as {score.outcome}: {str(score.detail)[:80]}"
    unpaid = score.outcome in ("wrong", "unparsable") and score.score > 0
    if unpaid or (score.outcome == "correct") != (score.score >= _FULL):
        return f"{response[:40]!r} is {score.outcome} with the score {score.score:g}"
    return ""


def _undeserved_entry(check: str, paid: int, count: int, said: str) -> CardEntry:
    rate = success_rate(paid, count)
    detail = f"{said[:40]!r}: paid in {paid}/{count}, {rate.value:.0%} [{rate.low:.0%}, {rate.high:.0%}]"
    numbers = {"paid": paid, "items": count, "rate_low": rate.low, "rate_high": rate.high, "said": said[:200]}
    if check == "empty reply":
        verdict = CardVerdict.FAILED if paid else CardVerdict.OK
    elif rate.low >= 0.5:
        verdict = CardVerdict.FAILED
    else:
        verdict = CardVerdict.WARNING if rate.low >= _PAID else CardVerdict.OK
    if verdict is CardVerdict.OK:
        detail = f"at most {rate.value:.0%} [{rate.low:.0%}, {rate.high:.0%}] paid"
    remedy = "pay only what answers the task; read the answer from one place, and refuse what has none"
    return CardEntry(_SECTION, check, verdict, detail, "" if verdict is CardVerdict.OK else remedy, numbers)


async def _hedging(subject: Subject, tasks: Sequence[ScoredTask]) -> list[CardEntry]:
    """Hide the right answer among wrong ones: at one end verifiers find it, elsewhere it is a lottery ticket."""
    check = "hedged replies"
    if tasks[0].answer is None:
        detail = "no task field is paid when said, so the right answers are not known"
        return [CardEntry(_SECTION, check, CardVerdict.SKIPPED, detail)]
    long = any("\n" in str(task.answer).strip() for task in tasks)
    ways = {name: write for name, write in _HEDGES.items() if not (long and name in _ONE_LINE_EACH)}
    found = []
    for name, write in ways.items():
        middle = [(task, write(_among(task, tasks, number, 2))) for number, task in enumerate(tasks)]
        first = [(task, write(_among(task, tasks, number, 0))) for number, task in enumerate(tasks)]
        last = [(task, write(_among(task, tasks, number, 4))) for number, task in enumerate(tasks)]
        paid = [
            sum(score.score >= 0.5 for score in await _score_all(subject, said))
            for said in (middle, first, last)
        ]
        rate = success_rate(paid[0], len(tasks))
        ends = min(paid[1], paid[2])
        if rate.low >= 0.2 or success_rate(ends, len(tasks)).low >= 0.2:
            found.append((name, max(paid[0], ends), middle[0][1]))
    if not found:
        detail = f"{len(ways)} ways to list five answers; only one place is read, if any"
        return [CardEntry(_SECTION, check, CardVerdict.OK, detail)]
    name, count, said = found[0]
    return [
        CardEntry(
            _SECTION,
            check,
            CardVerdict.FAILED,
            f"{said[:60]!r}: paid in {count}/{len(tasks)} wherever the right one stands",
            "several different answers are no answer: read one place only, or refuse them",
            {"ways": [each[0] for each in found], "paid": count, "items": len(tasks)},
        )
    ]


def _among(task: ScoredTask, tasks: Sequence[ScoredTask], number: int, index: int) -> list[str]:
    """Return five answers of which the right one stands at this index."""
    right = str(task.answer)
    wrong = list(
        dict.fromkeys(
            str(each.answer) for each in (*tasks[number + 1 :], *tasks[:number]) if each.answer != right
        )
    )
    numeric = re.fullmatch(r"-?\d+", right)
    extra = [str(int(right) + offset) if numeric else f"not {right[:20]} {offset}" for offset in (1, 2, 3, 5)]
    others = [each for each in dict.fromkeys([*wrong[:4], *extra]) if each != right][:4]
    return [*others[:index], right, *others[index:]]


async def _company(subject: Subject, tasks: Sequence[ScoredTask]) -> CardEntry:
    """Score the same items alone, together, reversed and doubled."""
    check = "same score in any company"
    few = tasks[:12]
    fields = _fields_to_say(tasks[0])
    items = [
        (task, said) for task in few for said in (*(str(task.fields.get(name)) for name in fields), "0", "")
    ]
    together = await _score_all(subject, items)
    versions = {
        "in reverse": list(reversed(await _score_all(subject, list(reversed(items))))),
        "alone": [(await _score_all(subject, [item]))[0] for item in items],
        "twice in a batch": (await _score_all(subject, [*items, *items]))[len(items) :],
        "again": await _score_all(subject, items),
    }
    for name, scores in versions.items():
        apart = [
            number
            for number, (one, other) in enumerate(zip(together, scores, strict=True))
            if (one.score, one.outcome) != (other.score, other.outcome)
        ]
        if apart:
            one, other = together[apart[0]], scores[apart[0]]
            return CardEntry(
                _SECTION,
                check,
                CardVerdict.FAILED,
                f"scored {name}, {len(apart)} of {len(items)} items differ: "
                f"{items[apart[0]][1][:30]!r} {one.score:g}, then {other.score:g}",
                "`score` may use the response and the task, and nothing that it kept",
                {"different": len(apart), "items": len(items), "how": name},
            )
    return CardEntry(
        _SECTION, check, CardVerdict.OK, f"{len(items)} items: alone, in a batch, reversed, doubled, again"
    )


async def _play_answers(subject: Subject, tasks: Sequence[ScoredTask]) -> None:
    """Play solved episodes, to measure their rewards, too."""
    answers = {task.seed: task.answer for task in tasks if task.seed is not None and task.answer is not None}
    policy = AuditPolicy("reference answer", lambda seed: lambda _observation, _info: answers[seed])
    subject.keep(
        await subject.arena().play([PlannedEpisode(policy, seed) for seed in answers if seed is not None])
    )


def _told(tasks: Sequence[ScoredTask]) -> list[CardEntry]:
    """See that nothing that is sent before the reply holds the answer; of the prompt more is said elsewhere."""
    known = [task for task in tasks if task.told is not None and task.answer and len(task.answer) >= 2]
    if not known:
        return []
    held = [task for task in known if _holds(task.told, str(task.answer), task.prompt)]
    rate = success_rate(len(held), len(known))
    return [
        CardEntry(
            "leaks",
            "answer told before the reply",
            CardVerdict.FAILED if rate.low >= 0.5 else CardVerdict.OK,
            f"the infos of {len(held)} of {len(known)} resets hold it",
            "tell the task only where the reset's option `expert` asks for it" if rate.low >= 0.5 else "",
            {"held": len(held), "resets": len(known)},
        )
    ]


def _holds(value: Any, answer: str, prompt: str) -> bool:
    """Return whether an info contains the answer in one of its texts or numbers, other than the prompt."""
    if isinstance(value, Mapping):
        return any(_holds(each, answer, prompt) for each in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds(each, answer, prompt) for each in value)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or str(value) == prompt:
        return False
    return _stands_in(answer, str(value))


def _stands_in(answer: str, text: str) -> bool:
    """Return whether a text contains the answer, as separate words."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


async def _reference(subject: Subject, tasks: Sequence[ScoredTask]) -> list[CardEntry]:
    """See that the reference answer is paid, also in a step, and does not stand in the prompt."""
    answered = [task for task in tasks if task.answer is not None]
    if not answered:
        detail = "no task field is paid in full when said as the response"
        return [CardEntry(_SECTION, "reference answer", CardVerdict.SKIPPED, detail)]
    field = answered[0].field
    entries = []
    long = [task for task in answered if len(str(task.answer)) >= 2 and task.prompt]
    held = [task for task in long if _stands_in(str(task.answer), task.prompt)]
    check = "answer in the prompt"
    if long:
        rate = success_rate(len(held), len(long))
        detail = f"{field} stands in {len(held)} of {len(long)} prompts"
        verdict = CardVerdict.WARNING if rate.low >= 0.5 else CardVerdict.OK
        remedy = (
            "see whether finding it there is the task, or gives it away"
            if verdict is not CardVerdict.OK
            else ""
        )
        entries.append(
            CardEntry(_SECTION, check, verdict, detail, remedy, {"held": len(held), "prompts": len(long)})
        )
    scores = await _score_all(subject, [(task, str(task.answer)) for task in answered])
    paid = sum(score.score >= _FULL for score in scores)
    entries.append(
        CardEntry(
            _SECTION,
            "reference answer",
            CardVerdict.OK if paid == len(answered) else CardVerdict.WARNING,
            f"{field}, said as it is: paid in full in {paid}/{len(answered)}",
            ""
            if paid == len(answered)
            else "a reference that its own verifier refuses costs every policy that task",
            {"paid": paid, "items": len(answered), "field": field},
        )
    )
    return entries
