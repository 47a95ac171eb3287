"""The page of a run: whole, still running, damaged, empty, huge or hostile, it is there and says what it found."""

import html
import json
import re

import pytest
from starlette.testclient import TestClient

from rollgym.trainer.cli import main
from rollgym.trainer.evaluation.reporting import charts
from rollgym.trainer.evaluation.reporting.charts import (
    ChartCurve,
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
from rollgym.trainer.models.tiny import build_tiny_tokenizer
from tests.support.report_runs import HOSTILE, episode, evaluation_set, metrics, page_of, write_run


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


@pytest.mark.parametrize("trained", ["model", "adapter"])
def test_a_run_is_finished_until_it_goes_on_with_more_steps(tmp_path, trained):
    run = write_run(tmp_path / "run")
    assert read_run(run).state == "stopped"
    (run / trained).mkdir()
    assert read_run(run).state == "finished"
    (run / "run.lock").write_text('{"pid": 1}')
    assert read_run(run).state == "running"


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
    assert line_chart([ChartCurve("a", [])]) == ""
    assert stacked_chart(["a"], [], [[]]) == ""


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0], [-2.0, 3.0], [0.0, 0.0]])
def test_points_stand_within_their_picture(values):
    chart = line_chart([ChartCurve("a", list(enumerate(values)))])
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
    monkeypatch.setattr(charts, "_saved", lambda figure, directory: figures.append(figure) or directory)
    charts.plot_run(tmp_path, "constant")
    (axis,) = [axis for axis in figures[0].axes if axis.get_title() == "staleness (versions)"]
    assert axis.get_ylim() == (0.0, 1.0)


def test_the_picture_leaves_out_what_was_not_finite(tmp_path):
    rows = [{"step": 1, "policy/entropy": 0.5}, {"step": 2, "policy/entropy": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert charts.plot_run(tmp_path, "a step that was left out").stat().st_size > 1000


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
