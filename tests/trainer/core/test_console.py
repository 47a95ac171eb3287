"""What is said on the console stands there as it was said, and what a server of one's own prints is read on."""

import asyncio

import pytest

from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.core.embedded_server import _read_on
from rollgym.trainer.records.run_metrics import RUN_METRICS

BOARD = (
    """:x: :smile: a:b:c [bold]not bold[/bold] [#] [/]
'text' 12.5 http://127.0.0.1:8000 /a/path None ✓ \\[x]
  #_O√XPS """
    + "a line much longer than a terminal is wide " * 8
)


@pytest.mark.parametrize("colours", [False, True])
@pytest.mark.parametrize("live", [False, True])
def test_text_is_printed_as_it_is(monkeypatch, capsys, colours, live):
    if colours:
        monkeypatch.setenv("FORCE_COLOR", "1")
    console = RunConsole(3, live=live, metrics=RUN_METRICS)
    console.say(BOARD)
    console.close()
    assert BOARD in capsys.readouterr().out


def test_a_step_is_one_line(capsys):
    console = RunConsole(3, live=False, metrics=RUN_METRICS)
    console.step(0, {"rollout/success": 0.5, "time/step_s": 1.0})
    assert capsys.readouterr().out.endswith("step 1: success 0.500  s/step 1.00\n")


ALL = {
    "rollout/success": 0.5,
    "rollout/reward": -0.25,
    "policy/entropy": 1.234,
    "time/tokens_per_s": 12345.0,
    "rollout/lag_mean": 1.5,
    "time/step_s": 10.0,
}


def test_a_step_is_broken_between_numbers_in_a_terminal_and_nowhere_in_a_file(monkeypatch, capsys):
    whole = "success 0.500  reward -0.250  entropy 1.234  tokens/s 12345  staleness 1.50  s/step 10.00"
    RunConsole(3, live=False, metrics=RUN_METRICS).step(0, ALL)
    assert capsys.readouterr().out.endswith(f"step 1: {whole}\n")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    RunConsole(3, live=False, metrics=RUN_METRICS).step(0, ALL)
    first, second = capsys.readouterr().out.splitlines()
    assert len(first) <= 80
    assert first.endswith("step 1: success 0.500  reward -0.250  entropy 1.234  tokens/s 12345")
    assert second == "    staleness 1.50  s/step 10.00"


def test_the_live_table_says_where_the_time_of_the_step_went(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = RunConsole(3, live=True, metrics=RUN_METRICS)
    parts = {"time/generate_s": 1.0, "time/train_s": 2.98, "time/sync_s": 0.02}
    console.step(0, {"time/step_s": 4.0, **parts})
    console.close()
    assert "of the step: generate 25%, train 74%" in capsys.readouterr().out


def test_before_the_first_step_no_empty_line_stands_below_the_bar(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = RunConsole(3, live=True, metrics=RUN_METRICS)
    console.begin_training(0)
    console.close()
    last = capsys.readouterr().out.split("training")[-1]
    assert last.count("\n") == 1


HOSTILE = "agent said \x1b]0;owned\x07\x1b[2Jred\r and \x9b31m"
SHOWN = r"agent said \x1b]0;owned\x07\x1b[2Jred\r and \x9b31m"


@pytest.mark.parametrize("live", [False, True])
def test_what_a_terminal_would_obey_is_shown_as_escapes(monkeypatch, capsys, live):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    console = RunConsole(3, live=live, metrics=RUN_METRICS)
    console.say(HOSTILE)
    console.explain(HOSTILE)
    console.status(HOSTILE)
    console.close()
    said = capsys.readouterr().out
    assert said.count(SHOWN) >= 2 + live
    assert "\x1b]" not in said
    assert "\x9b" not in said


async def test_a_line_that_is_longer_than_a_reader_keeps_does_not_end_the_reading():
    output = asyncio.StreamReader(limit=16)
    output.feed_data(b"x" * 1000 + b"\n" + b"y" * 1000)
    output.feed_eof()
    async with asyncio.timeout(20):
        await _read_on(output)
    assert output.at_eof()
