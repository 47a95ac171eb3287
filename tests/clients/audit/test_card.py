"""What a card says as a whole."""

import pytest

from rollgym.clients.audit.arena import Episode, Mark, tally
from rollgym.clients.audit.card import Card, Entry, Verdict


@pytest.mark.parametrize(
    ("verdicts", "passes", "passes_strictly"),
    [
        ([Verdict.OK, Verdict.SKIPPED], True, True),
        ([Verdict.OK, Verdict.WARNING], True, False),
        ([Verdict.WARNING, Verdict.FAILED], False, False),
    ],
)
def test_the_worst_verdict_decides(verdicts: list[Verdict], passes: bool, passes_strictly: bool) -> None:
    card = Card("it", {}, [Entry("section", str(verdict), verdict) for verdict in verdicts], 1.0)
    assert card.passes(Verdict.FAILED) is passes
    assert card.passes(Verdict.WARNING) is passes_strictly
    assert sum(card.counts().values()) == len(verdicts)


def test_a_tally_leaves_out_what_broke_off_and_says_nothing_of_success_where_nobody_does() -> None:
    mark = Mark("", 0.5, True, False, None, None)
    start = Mark("", 0.0, False, False, None, None)
    silent = tally([Episode("p", 0, [start, mark], ["a"]), Episode("p", 1)])
    assert silent is not None
    assert str(silent) == "return 0.5 in 1 episodes"
    solved = tally([Episode("p", 0, [start, mark._replace(success=True)], ["a"])])
    assert solved is not None
    assert str(solved) == "1/1 solved, 100% [21%, 100%], return 0.5"
    assert tally([]) is None
