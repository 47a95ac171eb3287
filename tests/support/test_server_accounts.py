"""What became of tokens that servers drew, by logs written by hand."""

import base64
import json
from array import array

import pytest

from tests.support.server_accounts import server_account_of
from tests.support.training_forks import ENGINE_LOG

SESSION, PROMPT = "train-0-0-0", [1, 2]


def stretch(began, tokens, finish="stop", prompt=(), version="a-0"):
    """A line of a server's log: it draws for a tenth of a second."""
    return {
        "session": SESSION,
        "prompt_ids": [*PROMPT, *prompt],
        "token_ids": tokens,
        "processed_logprobs": [-1.0] * len(tokens),
        "versions": [version] * len(tokens),
        "finish": finish,
        "began": began,
    }


@pytest.fixture
def account(tmp_path):
    def account(drawn, given, kills):
        log = tmp_path / "server.jsonl"
        log.write_text("".join(json.dumps(entry) + "\n" for entry in drawn))
        replies = [
            {
                "session": SESSION,
                "prompt": PROMPT,
                "ids": ids,
                "logprobs": base64.b64encode(array("d", [-1.0] * len(ids))).decode(),
                "versions": [0] * len(ids),
            }
            for ids in given
        ]
        (tmp_path / ENGINE_LOG).write_text("".join(json.dumps(reply) + "\n" for reply in replies))
        return server_account_of([log], tmp_path, kills, ended=100.0)

    return account


def test_of_two_equal_draws_the_one_before_the_kill_was_lost(account):
    found = account([stretch(1.0, [5]), stretch(3.0, [5]), stretch(4.0, [6], prompt=[5, 9])], [[5]], [2.0])
    assert (found.given, found.cut_off_by_a_kill, found.thrown_away) == (1, 1, 0)


def test_a_kill_in_a_replys_second_stretch_costs_both(account):
    drawn = [
        stretch(1.0, [5], finish="abort"),
        stretch(2.0, [6], prompt=[5]),
        stretch(4.0, [7]),
        stretch(5.0, [], prompt=[7]),
    ]
    found = account(drawn, [[7]], [3.0])
    assert (found.given, found.cut_off_by_a_kill, found.thrown_away) == (1, 2, 0)


def test_a_stretch_that_nobody_went_on_with_is_thrown_away(account):
    drawn = [stretch(1.0, [5], finish="abort"), stretch(2.0, [7]), stretch(3.0, [], prompt=[7])]
    found = account(drawn, [[7]], [2.5])
    assert (found.given, found.cut_off_by_a_kill, found.thrown_away) == (1, 0, 1)
