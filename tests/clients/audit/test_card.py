"""What a card says as a whole."""

import pytest

from rollgym.clients.audit.arena import Episode, RecordedStep, tally
from rollgym.clients.audit.card import Card, CardEntry, CardVerdict


@pytest.mark.parametrize(
    ("verdicts", "passes", "passes_strictly"),
    [
        ([CardVerdict.OK, CardVerdict.SKIPPED], True, True),
        ([CardVerdict.OK, CardVerdict.WARNING], True, False),
        ([CardVerdict.WARNING, CardVerdict.FAILED], False, False),
    ],
)
def test_the_worst_verdict_decides(verdicts: list[CardVerdict], passes: bool, passes_strictly: bool) -> None:
    card = Card("it", {}, [CardEntry("section", str(verdict), verdict) for verdict in verdicts], 1.0)
    assert card.passes(CardVerdict.FAILED) is passes
    assert card.passes(CardVerdict.WARNING) is passes_strictly
    assert sum(card.counts().values()) == len(verdicts)


def test_a_tally_leaves_out_what_broke_off_and_says_nothing_of_success_where_nobody_does() -> None:
    mark = RecordedStep("", 0.5, True, False, None, None)
    start = RecordedStep("", 0.0, False, False, None, None)
    silent = tally([Episode("p", 0, [start, mark], ["a"]), Episode("p", 1)])
    assert silent is not None
    assert str(silent) == "return 0.5 in 1 episodes"
    solved = tally([Episode("p", 0, [start, mark._replace(success=True)], ["a"])])
    assert solved is not None
    assert str(solved) == "1/1 solved, 100% [21%, 100%], return 0.5"
    assert tally([]) is None
