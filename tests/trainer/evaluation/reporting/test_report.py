"""The page of a run: whole, still running, damaged, empty, huge or hostile, it is there and says what it found."""

import html
import json
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from rollgym.trainer.cli import main
from rollgym.trainer.commands import plots
from rollgym.trainer.evaluation.reporting.charts import (
    Line,
    line_chart,
    short,
    stacked_chart,
    thinned,
    value_range,
)
from rollgym.trainer.evaluation.reporting.episodes import keep_tokenizer, token_text
from rollgym.trainer.evaluation.reporting.live import LivePage
from rollgym.trainer.evaluation.reporting.page import duration, render_page
from rollgym.trainer.evaluation.reporting.run_folder import NoRunError, number, read_run
from rollgym.trainer.inference.base import GenerationResult
from rollgym.trainer.models.tokenizer import build_tiny_tokenizer
from rollgym.trainer.records.group import Group
from rollgym.trainer.records.timeline import Timeline
from rollgym.trainer.records.trajectory import Outcome, Trajectory, Turn
from rollgym.trainer.rollout.recorder import Recorder
from rollgym.trainer.tasks.task import Task

HOSTILE = "</script></title><img src=x onerror=alert(1)>\"'><svg onload=alert(1)> {{7*7}} \u2028 \ud800 \x00 &lt;b&gt;"


def episode(step: int, index: int, text: str = "Right", tokens: int = 3, domain: str = "lake") -> dict:
    """A line of episodes.jsonl."""
    task = Task(index, "FrozenLake-v0", 7, {"size": 4}, None, domain)
    trajectory = Trajectory(task, 1, outcome=Outcome.SOLVED, metrics={"steps": 2.0})
    recorder = Recorder(trajectory)
    for number_, prompt in enumerate([[1, 2, 3], [1, 2, 3, *[5] * tokens, 4]]):
        segment = recorder.place(prompt)
        result = GenerationResult([5] * tokens, [-0.25] * tokens, [step] * tokens, "length")
        start, end = recorder.record(segment, result, number_)
        turn = Turn(segment, start, end, f"board {text}", text, reward=0.5, finish_reason="length")
        turn.advantages = [0.75 if number_ else -0.75] * tokens
        trajectory.turns.append(turn)
    trajectory.timeline = Timeline.from_seconds({"generate": 1.5, "environment": 0.5})
    group = Group(index, task, step, decision="kept").as_record(0)
    return {"step": step, "group": group, **trajectory.as_record()}


def metrics(step: int, domain: str = "lake") -> dict:
    """A line of metrics.jsonl that a training step wrote."""
    parts = {
        "generate": 1.0,
        "environment": 2.0,
        "verify": 0.0,
        "wait": 0.5,
        "train": 3.0,
        "sync": 0.25,
        "record": 0.25,
    }
    return {
        "step": step,
        "rollout/success": 0.125 * step,
        "rollout/reward": 0.1,
        "policy/entropy": None,
        "own/number": 1.0,
        "outcome/solved": 0.5,
        "outcome/failed": 0.5,
        "time/step_s": 7.0,
        "time/outside_s": 1.0,
        "time/tokens_per_s": 10.0,
        **{f"time/{name}_s": value for name, value in parts.items()},
        f"domain/{domain}/outcome/solved": 0.5,
        f"domain/{domain}/success": 0.25,
    }


def evaluation_set(step: int, name: str = "held_out", value: float = 0.5) -> dict:
    key = f"evaluate/{name}/sampled"
    bounds = {"success_low": value - 0.1, "success_high": value + 0.1, "episodes": 50.0}
    return {"step": step, f"{key}/success": value, **{f"{key}/{end}": bound for end, bound in bounds.items()}}


def write_run(directory: Path, *, steps: int = 6, text: str = "Right", name: str = "a run") -> Path:
    """A run as a trainer leaves it."""
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text(f"name: {json.dumps(name)}\nsteps: {steps}\nenv_token: sesame\n")
    rows = [
        evaluation_set(0, value=0.2),
        *(metrics(step) for step in range(1, steps + 1)),
        evaluation_set(steps, value=0.8),
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    episodes = [episode(step, step * 2 + place, text) for step in range(steps) for place in range(2)]
    (directory / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in episodes))
    events = [{"task": 0, "fate": "issued"}, {"task": 0, "fate": "trained", "step": 0}]
    events += [{"task": 1, "fate": "dropped", "reason": "filter:zero_variance"}]
    (directory / "ledger.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return directory


def page_of(directory: Path) -> str:
    return render_page(read_run(directory), now=2e9)


def test_a_whole_run_is_all_on_the_page(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "model").mkdir()
    page = page_of(run)
    assert "<h1>a run</h1>" in page
    assert "finished" in page
    for heading in (
        "Evaluation sets",
        "Training",
        "Where the time went",
        "Outcomes",
        "Domains",
        "Tasks",
        "Episodes",
        "Settings",
    ):
        assert f">{heading}</h2>" in page, heading
    assert "0.800 [0.700, 0.900]" in page
    assert "0.600 [" in page, "the gain, with its interval"
    assert page.count('class="episode"') == 12
    assert "log-probability -0.2500 (p 0.779) · advantage -0.7500 · version 0 · turn 0" in page
    assert "advantage +0.7500" in page
    assert page.count("reward 1 · 2 turns") == 12, "each episode's line says what it came to"
    assert '<i class="key part-generate"></i>generate' in page, "the colours of its bar are explained"
    assert "dropped: filter:zero_variance" in page
    assert "sesame" not in page
    assert "Not all of it could be read" not in page
    shares = re.findall(r'<td class="n">([\d.]+) %</td>', page)
    assert sum(map(float, shares)) == pytest.approx(100.0, abs=0.5)


def test_the_page_asks_for_nothing_from_anywhere(tmp_path):
    page = page_of(write_run(tmp_path / "run"))
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert "url(" not in page
    assert "default-src 'none'" in page


def test_what_episodes_say_is_only_text(tmp_path):
    run = write_run(tmp_path / "run", text=HOSTILE, name=HOSTILE)
    rows = [
        metrics(1, domain=HOSTILE) | {f"own/{HOSTILE}": 1.0},
        evaluation_set(1, name=HOSTILE.replace("/", "")),
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = page_of(run).encode("utf-8", "backslashreplace").decode()
    assert "<img" not in page
    assert "<svg onload" not in page
    assert page.count("</script>") == 1
    assert page.count("</title>") == 1
    assert "{{7*7}}" in page
    assert html.escape("<img src=x onerror=alert(1)>", quote=False) in page


def test_a_run_that_is_still_written_to_is_read_as_far_as_it_goes(tmp_path):
    run = write_run(tmp_path / "run")
    for name in ("metrics.jsonl", "episodes.jsonl", "ledger.jsonl"):
        path = run / name
        path.write_bytes(path.read_bytes()[:-20])
    (run / "run.lock").write_text('{"pid": 1}')
    found = read_run(run)
    assert found.state == "running"
    assert found.notes == [], "a last line without its end is no damage"
    assert len(found.training) == 6
    assert len(found.episodes) == 11


def test_damaged_lines_are_passed_over_and_told(tmp_path):
    run = write_run(tmp_path / "run")
    bad = ["{", "[]", '{"step": "x"}', '{"step": true}', "\x00" * 50, "[" * 100_000]
    for name in ("metrics.jsonl", "ledger.jsonl", "episodes.jsonl"):
        path = run / name
        path.write_text("\n".join(bad) + "\n" + path.read_text())
    (run / "config.yaml").write_text("name: [")
    found = read_run(run)
    assert len(found.training) == 6
    assert len(found.episodes) == 12
    assert found.tasks == {"dropped/filter:zero_variance": 1, "trained": 1}
    assert any("metrics.jsonl: 6 lines could not be read" in note for note in found.notes)
    page = render_page(found)
    assert "Not all of it could be read" in page
    assert "config.yaml cannot be read" in page


def test_episodes_of_an_earlier_release_are_named(tmp_path):
    run = write_run(tmp_path / "run")
    old = {"step": 0, "turns": [], "segments": []}
    (run / "episodes.jsonl").write_text(json.dumps(old) + "\n")
    found = read_run(run)
    assert found.episodes == []
    assert "an earlier release wrote it" in found.notes[0]


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "episodes.jsonl", "ledger.jsonl"])
def test_a_run_that_has_only_begun_has_a_page(tmp_path, name):
    (tmp_path / name).write_text("")
    assert "has recorded no step yet" in page_of(tmp_path)


def test_a_run_of_one_step_has_a_page(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    assert "Where the time went" in page_of(run)


def test_tokens_are_shown_as_their_tokenizer_says_them(tmp_path):
    run = write_run(tmp_path / "run")
    tokenizer = build_tiny_tokenizer()
    keep_tokenizer(tokenizer, run)
    text = token_text(run)
    ids = tokenizer("Right <b>é</b>\n").input_ids
    assert "".join(map(text, ids)).replace("\ufffd", "") in {"Right <b>é</b>\n", "Right <b></b>\n"}
    assert text(10**9) == "[1000000000]"
    assert text(-1) == "[-1]"
    assert f">{html.escape(text(5))}</b>" in page_of(run)
    (run / "tokenizer.json").write_text("{")
    assert token_text(run) is None
    assert ">5</b>" in page_of(run), "ids, where no text is known"


def test_a_directory_without_a_run_is_refused(tmp_path, capsys):
    with pytest.raises(NoRunError, match=r"name a run's output_dir"):
        read_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_huge_run_has_a_small_page(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 10_001):
            file.write(json.dumps(metrics(step)) + "\n")
    with (run / "episodes.jsonl").open("w") as file:
        file.write(json.dumps(episode(0, 0, "x" * 9_000_000)) + "\n")  # too long to be read
        for step in range(300):
            file.write(json.dumps(episode(step, step, "wide " * 4_000, tokens=2_000)) + "\n")
    found = read_run(run)
    assert found.steps == 10_000
    assert len(found.training) <= 8_000
    assert (found.training[0]["step"], found.training[-1]["step"]) == (1, 10_000)
    assert found.sums["time/step_s"] == 70_000.0, "of all steps, not of those that are kept"
    assert found.sums["tokens"] == 700_000.0
    assert 20 <= len(found.episodes) <= 96
    steps = [played.step for played in found.episodes]
    assert steps == sorted(steps)
    assert steps[0] < 20
    assert steps[-1] > 270
    page = render_page(found)
    assert len(page) < 4 * 2**20
    assert "tokens more" in page
    assert "characters" in page


def test_numbers_that_are_none_are_no_points():
    row = {"a": True, "b": None, "c": "1", "d": 10**400, "e": float("inf"), "f": 2, "g": 0.5}
    assert [number(row, name) for name in "abcdefg"] == [None] * 5 + [2.0, 0.5]
    assert number(row, "missing") is None


def test_curves_are_thinned_to_means():
    points = [(float(step), float(step)) for step in range(1_000)]
    thin = thinned(points, 100)
    assert len(thin) == 100
    assert thin[0] == (4.5, 4.5)
    assert sum(value for _, value in thin) / 100 == pytest.approx(499.5)
    assert thinned(points[:10], 100) == points[:10]


def test_a_curve_without_points_is_no_picture():
    assert line_chart([Line("a", [])]) == ""
    assert stacked_chart(["a"], [], [[]]) == ""


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0], [-2.0, 3.0], [0.0, 0.0]])
def test_points_stand_within_their_picture(values):
    chart = line_chart([Line("a", list(enumerate(values)))])
    numbers = re.findall(r'points="([^"]+)"', chart)[0].split()
    for pair in numbers:
        x, y = map(float, pair.split(","))
        assert 0 <= x <= 360
        assert 0 <= y <= 168


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([0.0, 0.0], 0.0, 1.0),
        ([0.001], 0.0, 0.00125),
        ([-2.0, -2.0], -2.5, 0.0),
        ([0.3, 0.1 + 0.2], 0.0, 0.375),  # alike but for rounding
        ([0.0, 1.0], 0.0, 1.06),
        ([-1.0, 1.0], -1.12, 1.12),
    ],
)
def test_an_axis_stays_on_the_side_of_zero_where_its_values_are(values, low, high):
    assert value_range(values) == pytest.approx((low, high))


def test_the_picture_of_constants_has_no_axis_below_zero(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "rollout/lag_mean": 0.0}) + "\n" for step in range(3))
    )
    figures = []
    monkeypatch.setattr(plots, "_saved", lambda figure, directory: figures.append(figure) or directory)
    plots.plot_run(tmp_path, "constant")
    (axis,) = [axis for axis in figures[0].axes if axis.get_title() == "staleness (versions)"]
    assert axis.get_ylim() == (0.0, 1.0)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0"),
        (0.1234, "0.123"),
        (1234.0, "1,234"),
        (56_789.0, "56.8k"),
        (2.5e7, "25M"),
        (1e-5, "1.0e-05"),
    ],
)
def test_numbers_are_short(value, said):
    assert short(value) == said


@pytest.mark.parametrize(
    ("seconds", "said"), [(59.6, "60 s"), (600, "10 min"), (7_300, "2 h"), (400_000, "5 days")]
)
def test_times_are_said_in_their_unit(seconds, said):
    assert duration(seconds) == said


def test_the_command_writes_the_page_beside_the_run(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert str(run / "report.html") in capsys.readouterr().out
    assert main(["report", str(run), "--output", str(tmp_path / "missing" / "page.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--serve", "--output", "x.html"], "leave --output out"),
        (["--port", "80"], "--port belongs to --serve"),
        (["--serve", "--port", "70000"], "'70000' is no port"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path, capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path), *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_served_page_follows_the_run(tmp_path):
    run = write_run(tmp_path / "run")
    client = TestClient(LivePage(run, look_s=0.01).application(), base_url="http://127.0.0.1:8123")
    first = client.get("/")
    assert "data-live" in first.text
    assert first.headers["cache-control"] == "no-store"
    assert client.get("/").text == first.text
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(7)) + "\n")
    assert client.get("/").text != first.text
    for name in ("evil.example", "evil.example:8123", "127.0.0.1.evil.example", ""):
        assert client.get("/", headers={"host": name}).status_code == 421
        assert client.get("/events", headers={"host": name}).status_code == 421


async def test_the_stream_has_an_event_whenever_the_files_have_grown(tmp_path):
    run = write_run(tmp_path / "run")

    class Request:
        async def is_disconnected(self):
            return False

    changes = LivePage(run, look_s=0.01)._changes(Request())
    assert (await anext(changes)).startswith(":")
    with (run / "ledger.jsonl").open("a") as file:
        file.write("{}\n")
    assert await anext(changes) == "data: changed\n\n"
    await changes.aclose()


def test_a_run_that_learns_nothing_says_so_on_its_page(tmp_path):
    run = write_run(tmp_path / "run", steps=3)
    assert "<h2>Health</h2>" not in page_of(run), "of a run that recorded none of it"
    rows = [
        metrics(step)
        | {
            "rollout/groups_kept": 2.0,
            "policy/optimizer_steps": float(step < 3),
            "policy/skipped_steps": 2.0 * (step == 3),
            "policy/entropy": 0.5 / step,
            "health/equal_groups": 1.0,
            "health/steps_without_learning": float(step - 1),
        }
        for step in (1, 2, 3)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = page_of(run)
    found = dict(re.findall(r'<tr><td>([^<]+)</td><td class="n">([^<]+)</td></tr>', page))
    assert found["steps without an optimizer step"] == "1 of 3"
    assert found["optimizer steps left out, not finite"] == "2"
    assert found["most steps in a row without learning"] == "2"
    assert found["entropy at first and at last (nats)"] == "0.5, 0.167"
    assert "Groups that teach nothing (share)" in page
    assert page.index("paid alike") < page.index('id="time"')
