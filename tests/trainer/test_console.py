"""What is said on the console stands there as it was said."""

import pytest

from trainer.core.console import RunConsole

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
    console = RunConsole(3, live=live)
    console.say(BOARD)
    console.close()
    assert BOARD in capsys.readouterr().out


def test_a_step_is_one_line(capsys):
    console = RunConsole(3, live=False)
    console.step(0, {"rollout/success": 0.5, "time/step_s": 1.0})
    assert capsys.readouterr().out.endswith("step 1: success 0.500  s/step 1.00\n")


def test_the_live_table_says_where_the_time_of_the_step_went(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = RunConsole(3, live=True)
    parts = {"time/generate_s": 1.0, "time/train_s": 2.98, "time/sync_s": 0.02}
    console.step(0, {"time/step_s": 4.0, **parts})
    console.close()
    assert "of the step: generate 25%, train 74%" in capsys.readouterr().out
