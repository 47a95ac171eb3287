"""What became of every token that was sampled in a run that was killed again and again."""

import base64
import json
import shutil
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rollgym.trainer.records.ledger import LEDGER_FILE
from rollgym.trainer.records.rollout_log import ROLLOUT_LOG_FOLDER, Entry, EpisodeKey, RolloutLog
from rollgym.trainer.records.trajectory import Trajectory
from tests.support.training_forks import ARCHIVE, ENGINE_LOG

Reply = tuple[tuple[int, ...], bytes]
"""Ids of a reply, and its log-probabilities as they are in memory."""


@dataclass
class TokenAccount:
    """The sums of a run.

    Attributes:
        drawn: Tokens that the inference client gave.
        logged: Tokens that the rollout log had.
        consumed: Tokens of the episodes that steps took up.
        drawn_twice: Tokens of replies that were sampled although the log had them.
        lost: Tokens that the log had and no episode has, nor was given up by name.
        in_flight: Tokens that were drawn and had not reached the log when their trainer was killed.
        given_up: Tokens of episodes that began again, failed, or were still being played at the end, by reason.
        faults: What else does not fit, in words.
    """

    drawn: int = 0
    logged: int = 0
    consumed: int = 0
    drawn_twice: int = 0
    lost: int = 0
    in_flight: int = 0
    given_up: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def account_of(run: Path, beside: Path, steps: int, groups_per_step: int) -> TokenAccount:
    """Compare the inference client's own log, the rollout log, the episodes and the ledger of a run."""
    account = TokenAccount()
    logged: dict[EpisodeKey, list[Reply]] = defaultdict(list)
    void: dict[EpisodeKey, list[Reply]] = defaultdict(list)
    failed: set[EpisodeKey] = set()
    for entry in _entries(run, beside):
        if entry.kind == "reply":
            logged[entry.key].append((tuple(array("q", entry.fields[1])), entry.fields[2]))
        elif entry.kind == "cut" and entry.fields[0] == 0:
            void[entry.key] += logged.pop(entry.key, [])
        elif entry.kind == "end":
            failed.add(entry.key)
    drawn = _drawn(beside)
    for key, turns in drawn.items():
        _note_draws(account, turns, [*void[key], *logged[key]], begun_again=bool(void[key]))
    for key in [*logged, *void]:
        given = Counter(reply for turn in drawn.get(key, {}).values() for reply in turn)
        if missing := Counter([*logged[key], *void[key]]) - given:
            account.faults.append(f"{key}: the log has {missing.total()} replies that nobody gave")
    consumed = _consumed(run, account, steps, groups_per_step)
    unfinished = _unfinished(run)
    for key in {*logged, *void}:
        replies = logged[key]
        account.logged += _tokens(replies) + _tokens(void[key])
        account.given_up["begun again"] += _tokens(void[key])
        if key in consumed:
            account.lost += _tokens((Counter(replies) - Counter(consumed[key])).elements())
        elif key in failed or key._replace(attempt=key.attempt + 1) in logged:
            account.given_up["failed"] += _tokens(replies)
        elif key.task in unfinished:
            account.given_up["the run ended"] += _tokens(replies)
        else:
            account.lost += _tokens(replies)
    for key, replies in consumed.items():
        account.consumed += _tokens(replies)
        if Counter(replies) - Counter(logged[key]):
            account.faults.append(f"{key}: an episode has replies that are not in the log")
    return account


def _drawn(beside: Path) -> dict[EpisodeKey, dict[int, list[Reply]]]:
    """Return what the inference client gave, by episode and turn, in order."""
    drawn: dict[EpisodeKey, dict[int, list[Reply]]] = defaultdict(lambda: defaultdict(list))
    for line in (beside / ENGINE_LOG).read_text().splitlines():
        reply = json.loads(line)
        purpose, *numbers = reply["session"].split("-")
        if purpose == "train":
            found = tuple(reply["ids"]), base64.b64decode(reply["logprobs"])
            drawn[EpisodeKey(*map(int, numbers))][reply["turn"]].append(found)
    return drawn


def _note_draws(
    account: TokenAccount, turns: dict[int, list[Reply]], logged: list[Reply], *, begun_again: bool
) -> None:
    """Tell the draws of each turn that the log has from those that never reached it."""
    left = Counter(logged)
    for draws in turns.values():
        account.drawn += _tokens(draws)
        is_logged = []
        for reply in reversed(draws):  # of two equal ones it is the last that was written down
            is_logged.append(left[reply] > 0)
            left[reply] -= is_logged[-1]
            account.in_flight += 0 if is_logged[-1] else len(reply[0])
        if not begun_again and (not is_logged[0] or sum(is_logged) > 1) and any(is_logged):
            account.drawn_twice += _tokens(draws[-1:])


def _entries(run: Path, beside: Path) -> Iterator[Entry]:
    """Yield all that was ever logged, in order."""
    kept = {path.stat().st_ino: path for path in (beside / ARCHIVE).iterdir()}
    kept |= {path.stat().st_ino: path for path in (run / ROLLOUT_LOG_FOLDER).glob("*.log")}
    everything = beside / "everything"
    shutil.rmtree(everything, ignore_errors=True)
    everything.mkdir()
    for number, path in enumerate(sorted(kept.values(), key=lambda path: path.stat().st_mtime_ns), start=1):
        (everything / f"{number:06d}.log").hardlink_to(path)
    yield from RolloutLog(everything, durable=False, say=print).read()


def _consumed(
    run: Path, account: TokenAccount, steps: int, groups_per_step: int
) -> dict[EpisodeKey, list[Reply]]:
    consumed: dict[EpisodeKey, list[Reply]] = {}
    groups: dict[int, set[int]] = defaultdict(set)
    for line in (run / "episodes.jsonl").read_text().splitlines():
        record = json.loads(line)
        episode = Trajectory.from_record(record)
        key = EpisodeKey(episode.task.index, episode.member, episode.attempt)
        if key in consumed:
            account.faults.append(f"{key} was taken up twice")
        consumed[key] = [
            (
                tuple(segment.ids[turn.start : turn.end]),
                array("d", segment.behaviour_logprobs[turn.start : turn.end]).tobytes(),
            )
            for turn in episode.turns
            for segment in [episode.segments[turn.segment]]
        ]
        groups[record["step"]].add(episode.task.index)
    if {step: len(each) for step, each in groups.items()} != dict.fromkeys(range(steps), groups_per_step):
        account.faults.append("not every step took up as many groups as it should")
    fates: dict[int, str] = {}
    for line in (run / LEDGER_FILE).read_text().splitlines():
        event = json.loads(line)
        fates[event["task"]] = event["fate"]
    taken = {index for each in groups.values() for index in each}
    for index in taken:
        if fates.get(index) not in ("trained", "dropped"):
            account.faults.append(f"the ledger says of task {index}: {fates.get(index)}")
    for index, fate in fates.items():
        if fate == "trained" and index not in taken:
            account.faults.append(f"task {index} is in the ledger as trained, and in no step")
        if fate not in ("trained", "dropped"):
            account.faults.append(f"task {index} has no end: {fate}")
    return consumed


def _unfinished(run: Path) -> set[int]:
    reasons: dict[int, str] = {}
    for line in (run / LEDGER_FILE).read_text().splitlines():
        event = json.loads(line)
        reasons[event["task"]] = event.get("reason", "")
    return {task for task, reason in reasons.items() if reason == "the run ended"}


def _tokens(replies: Iterable[Reply]) -> int:
    return sum(len(ids) for ids, _ in replies)
