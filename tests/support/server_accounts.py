"""What became of every token that inference servers drew, by their own logs, in a run that was killed."""

import base64
import json
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.training_forks import ENGINE_LOG

_CLOCK_S = 0.05
"""How far the clocks of two processes of one machine are apart, by the time of writing."""

_Place = tuple[str, tuple[int, ...]]
"""Session and prompt."""

_Token = tuple[int, float, str]
"""Id, log-probability, and the version that drew it, as the server was told to call it."""


@dataclass
class ServerAccount:
    """The sums of a run's servers.

    Attributes:
        replies: Stretches of replies that servers drew for episodes.
        drawn: Their tokens.
        given: Tokens that the run's client had from them.
        stretches_of_interrupted_replies: Stretches that an update or a lost server cut off, and that were kept.
        cut_off_by_a_kill: Tokens that never reached the client, because it or the server was killed.
        drawn_by_other_weights: Tokens that a server drew when it was started again and had not been sent the run's.
        thrown_away: Tokens that never reached it although nobody was killed meanwhile.
        under_way_at_the_end: Tokens of replies that nobody waited for when the run ended.
        faults: What does not fit, in words.
    """

    replies: int = 0
    drawn: int = 0
    given: int = 0
    stretches_of_interrupted_replies: int = 0
    cut_off_by_a_kill: int = 0
    drawn_by_other_weights: int = 0
    thrown_away: int = 0
    under_way_at_the_end: int = 0
    faults: list[str] = field(default_factory=list)


def server_account_of(
    logs: Iterable[Path], beside: Path, kills: Sequence[float], ended: float
) -> ServerAccount:
    """Compare the logs of servers with what the run's inference client gave.

    Args:
        logs: The servers' own logs.
        beside: What was kept of the run's inference client.
        kills: When something was killed, in seconds since the epoch.
        ended: When the run had ended.
    """
    account = ServerAccount()
    drawn: dict[_Place, list[dict[str, Any]]] = defaultdict(list)
    for entry in _entries(logs):
        account.replies += 1
        account.drawn += len(entry["token_ids"])
        drawn[entry["session"], tuple(entry["prompt_ids"])].append(entry)
    for reply in _replies(beside):
        tokens = list(zip(reply["ids"], reply["logprobs"], map(str, reply["versions"]), strict=True))
        found = _stretches(drawn, reply["session"], tuple(reply["prompt"]), tokens)
        if found is None:
            account.faults.append(f"{reply['session']}: the client gave {tokens}, which no server drew so")
            continue
        account.given += len(reply["ids"])
        account.stretches_of_interrupted_replies += len(found) - 1
        for each in found:
            drawn[each["session"], tuple(each["prompt_ids"])].remove(each)
    for entry in (each for entries in drawn.values() for each in entries):
        _note_unused(account, entry, kills, ended)
    return account


def _note_unused(account: ServerAccount, entry: dict[str, Any], kills: Sequence[float], ended: float) -> None:
    """Say why nobody has a stretch that a server drew."""
    count = len(entry["token_ids"])
    if any("-" not in label for label in entry["versions"]):
        account.drawn_by_other_weights += count
    elif any(entry["began"] - _CLOCK_S <= kill <= entry["next"] + _CLOCK_S for kill in kills):
        account.cut_off_by_a_kill += count
    elif entry["next"] < ended:
        account.thrown_away += count
    else:
        account.under_way_at_the_end += count


def _entries(logs: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield stretches of training episodes, each with when what follows its reply was asked for.

    A stretch that an update cut off is the beginning of a reply: a kill while a server goes on with it costs both.
    """
    sessions: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in logs:
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if (entry["session"] or "").startswith("train-"):
                sessions[entry["session"]].append(entry)
    for entries in sessions.values():
        entries.sort(key=lambda entry: entry["began"])
        after = None
        for entry in reversed(entries):
            if after is None:
                entry["next"] = float("inf")
            elif (
                entry["finish"] == "abort" and after["prompt_ids"] == entry["prompt_ids"] + entry["token_ids"]
            ):
                entry["next"] = after["next"]
            else:
                entry["next"] = after["began"]
            after = entry
        yield from entries


def _replies(beside: Path) -> Iterator[dict[str, Any]]:
    for line in (beside / ENGINE_LOG).read_text().splitlines():
        reply = json.loads(line)
        if reply["session"].startswith("train-"):
            reply["logprobs"] = array("d", base64.b64decode(reply["logprobs"])).tolist()
            yield reply


def _stretches(
    drawn: dict[_Place, list[dict[str, Any]]], session: str, prompt: tuple[int, ...], tokens: list[_Token]
) -> list[dict[str, Any]] | None:
    """Return the stretches that a reply is made of: each reads what the ones before it have drawn."""
    # The same weights draw the same tokens for the same seed. Of two such draws the first one was lost, or nobody would
    # have asked again.
    for entry in reversed(drawn.get((session, prompt), [])):
        own = _tokens(entry)
        if not own or own != tokens[: len(own)]:
            continue
        if len(own) == len(tokens):
            return [entry]
        rest = _stretches(drawn, session, (*prompt, *entry["token_ids"]), tokens[len(own) :])
        if rest is not None:
            return [entry, *rest]
    return None


def _tokens(entry: dict[str, Any]) -> list[_Token]:
    versions = [label.rpartition("-")[2] for label in entry["versions"]]
    return list(zip(entry["token_ids"], entry["processed_logprobs"], versions, strict=True))
