"""What `roll-env check` says of an environment that holds up those who share its process."""

import orjson
import pytest

from rollgym.clients.checks.costs import check_costs
from rollgym.clients.checks.report import Finding, Status
from rollgym.clients.checks.target import CheckTarget
from rollgym.clients.measuring.long_texts import TEXT_BYTES, long_texts

PLANTED = "tests.support.planted.environments"
RESET, MEGABYTE = "a reset takes less than 50 ms", "a megabyte is read in less than 50 ms"


def findings(name: str) -> dict[str, Finding]:
    return {finding.check: finding for finding in check_costs(CheckTarget(f"{PLANTED}:{name}"))}


def test_a_pattern_that_looks_back_is_found() -> None:
    found = findings("LooksBack")
    assert found[RESET].status is Status.PASS
    assert found[MEGABYTE].status is Status.FAIL
    assert "'a' over and over" in found[MEGABYTE].detail
    assert "look at no place of a reply twice" in found[MEGABYTE].remedy


@pytest.mark.parametrize("name", ["BroodsAtReset", "SleepsAtReset"])
def test_a_reset_that_takes_its_time_is_found(name: str) -> None:
    found = findings(name)
    assert found[RESET].status is Status.FAIL
    assert "metadata['inline']" in found[RESET].remedy


def test_what_is_quick_passes() -> None:
    assert {finding.status for finding in findings("Sums").values()} == {Status.PASS}


@pytest.mark.parametrize("size", [1_000, TEXT_BYTES])
def test_long_texts_fill_a_request_and_no_more(size: int) -> None:
    for name, text in long_texts(size):
        assert 0.5 * size < len(orjson.dumps(text)) <= size + 60, name
