"""Episodes of a file, and of a run, stepped through and proved by a person in a real browser."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.support.console import choose, episode_of, open_play, tile
from tests.support.wire import Server


def test_an_episode_is_downloaded_and_proved(page: Page, tmp_path: Path) -> None:
    open_play(page, "FrozenLake-v0")
    expect(page.get_by_role("button", name="Left")).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(tile(page, "Steps")).to_have_text("1")
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Download the episode").click()
    file = tmp_path / downloading.value.suggested_filename
    downloading.value.save_as(file)
    assert file.name == "FrozenLake-v0-seed4-1steps.json"
    assert json.loads(file.read_text())["actions"] == ["Down"]
    page.get_by_role("button", name="Step through it").click()
    expect(page.get_by_text("Same: every digest of 1 step ")).to_be_visible()
    page.get_by_label("Episode file").set_input_files(file)
    expect(page.get_by_text("Same: every digest of 1 step ")).to_be_visible()


def test_a_replay_goes_forward_and_back_with_keys(page: Page, served: Server) -> None:
    page.goto("/console#/replay")
    choose(page, episode_of(served, *"abcd"))
    expect(page.get_by_text("Same: every digest of 4 steps is what was recorded.")).to_be_visible()
    seen = page.get_by_role("region", name="Observation")
    expect(seen).to_contain_text("begin")
    page.get_by_role("button", name="Forward").press("Enter")
    expect(seen).to_have_text("1 a")
    page.get_by_role("button", name="Last").press("Enter")
    expect(seen).to_have_text("4 d")
    page.get_by_role("button", name="Back").press("Enter")
    expect(seen).to_have_text("3 c")
    page.get_by_label("Step", exact=True).press("ArrowLeft")
    expect(seen).to_have_text("2 b")
    expect(page.locator(".place")).to_have_text("step 1: action b, reward 1")
    page.get_by_role("button", name="step 3").press("Enter")
    expect(seen).to_have_text("4 d")
    expect(page.locator("td.digest", has_text="✓ same")).to_have_count(5)


@pytest.mark.parametrize(
    ("tamper", "told"),
    [
        (lambda episode: episode["digests"].__setitem__(1, "0123456789abcdef"), "Differs at step 1"),
        (lambda episode: episode["actions"].__setitem__(2, "x"), "Differs at step 2"),
        (lambda episode: episode.update(seed=6), "Differs at the reset"),
    ],
)
def test_a_tampered_episode_is_found_out(page: Page, served: Server, tamper: Any, told: str) -> None:
    episode = episode_of(served, *"abcd")
    tamper(episode)
    page.goto("/console#/replay")
    choose(page, episode)
    expect(page.locator(".verdict")).to_contain_text(told)
    expect(page.locator("td.digest", has_text="✗ now")).to_have_count(1)
    expect(page.locator("tr[aria-current=step]")).to_contain_text("✗ now")


def test_a_fork_that_was_seeded_anew_is_proved(page: Page, served: Server) -> None:
    with httpx.Client(base_url=served.url) as client:
        made = client.post(
            "/v1/sessions", json={"env_id": "Count", "kwargs": {"length": 9}, "reset": {"seed": 5}}
        )
        path = f"/v1/sessions/{made.json()['session_id']}"
        client.post(f"{path}/step", json={"action": "a"})
        (copy,) = client.post(f"{path}/fork", json={"reseed": 3}).json()["session_ids"]
        client.post(f"/v1/sessions/{copy}/step", json={"action": "b"})
        episode = client.get(f"/v1/sessions/{copy}/episode").json()
        client.post("/v1/sessions/close", json={"session_ids": [made.json()["session_id"], copy]})
    assert episode["reseeds"]
    page.goto("/console#/replay")
    choose(page, episode)
    expect(page.get_by_text("Same: every digest of 2 steps")).to_be_visible()


def test_a_file_that_is_no_episode_is_refused(page: Page, served: Server) -> None:
    page.goto("/console#/replay")
    for content, told in (
        ("{", "is not JSON"),
        ("[1]", "not a portable episode"),
        ('{"env_id": "Count", "format": 1}', "no lists of actions"),
        ({**episode_of(served), "env_id": "Nowhere"}, "there is no environment 'Nowhere'"),
    ):
        choose(page, content)
        expect(page.get_by_role("alert")).to_contain_text(told)
        expect(page.locator(".verdict")).to_contain_text("Not proved")


def run_lines(server: Server) -> list[str]:
    """Episodes as a run writes them: one as it was played, one that was paid otherwise, one of another environment."""
    task = {"index": 0, "env_id": "FrozenLake-v0", "kwargs": {"size": 4}, "seed": 4, "options": None}
    turns = []
    with httpx.Client(base_url=server.url) as client:
        made = client.post(
            "/v1/sessions", json={"env_id": "FrozenLake-v0", "kwargs": {"size": 4}, "reset": {"seed": 4}}
        ).json()
        path, seen = f"/v1/sessions/{made['session_id']}", made["reset"]["observation"]
        for reply in ["Down", "nonsense", "Down"]:
            step = client.post(f"{path}/step", json={"action": reply}).json()
            turns.append({"observation": seen, "reply": reply, "reward": step["reward"], "valid": True})
            seen = step["observation"]
        client.delete(path)
    played = {"step": 2, "task": task, "member": 1, "outcome": "failed", "detail": "", "reward": 0.0}
    summary = {"observation": "Sum up.", "reply": "I went down.", "reward": 0.0, "is_summary": True}
    paid = [turns[0], turns[1] | {"reward": 0.5, "valid": False}, turns[2]]
    return [
        json.dumps(played | {"turns": [*turns[:2], summary, turns[2]], "segments": [{"ids": [1, 2, 3]}]}),
        json.dumps(played | {"outcome": "solved", "member": 2, "turns": paid}),
        json.dumps(played | {"turns": []}),
    ]


def choose_run(page: Page, text: str) -> None:
    file = {"name": "episodes.jsonl", "mimeType": "application/octet-stream", "buffer": text.encode()}
    page.get_by_label("Episode file").set_input_files(file)


def test_the_episodes_of_a_run_are_read_turn_by_turn(page: Page, served: Server) -> None:
    played, paid, silent = run_lines(served)
    page.goto("/console#/replay")
    choose_run(page, "\n".join([played, "not an episode", paid, silent, '{"step": 3, "ta']))
    expect(page.get_by_text("3 episodes. Not episodes: line 2.")).to_contain_text("last line is not written")
    page.get_by_role("button", name="line 1", exact=True).click()
    episode = page.get_by_role("region", name="Episode of the run")
    for text in ("FrozenLake-v0", "Member of its group1", "turn 0: reward 0"):
        expect(episode).to_contain_text(text)
    expect(episode.get_by_role("region", name="Reply")).to_contain_text("Down")
    episode.get_by_role("button", name="Forward").click()
    expect(episode.get_by_role("region", name="Reply")).to_contain_text("nonsense")
    episode.get_by_role("button", name="Play it again").click()
    expect(episode.get_by_text("Same: 3 turns")).to_be_visible()
    episode.get_by_role("button", name="Forward").click()
    expect(episode).to_contain_text("turn 2: a summary of the history")
    page.get_by_label("Outcome").select_option("solved")
    expect(page.get_by_role("region", name="Episodes of the run").get_by_role("row")).to_have_count(2)
    page.get_by_role("button", name="line 3").click()
    episode.get_by_role("button", name="Play it again").click()
    expect(episode.get_by_text("Differs at turn 1: the server pays 0, and 0.5 was recorded")).to_be_visible()
    expect(episode.get_by_text("turn 1: reward 0.5, not understood")).to_be_visible()
    page.get_by_label("Outcome").select_option("")
    page.get_by_role("button", name="line 4").click()
    expect(episode.get_by_text("The policy said nothing.")).to_be_visible()


def test_a_long_run_is_listed_in_parts(page: Page, served: Server) -> None:
    played, _, _ = run_lines(served)
    page.goto("/console#/replay")
    choose_run(page, f"{played}\n" * 250)
    rows = page.get_by_role("region", name="Episodes of the run").get_by_role("row")
    expect(page.get_by_text("250 episodes.")).to_be_visible()
    expect(rows).to_have_count(101)
    page.get_by_role("button", name="Show more").click()
    page.get_by_role("button", name="Show more").click()
    expect(rows).to_have_count(251)
    expect(page.get_by_role("button", name="Show more")).to_be_hidden()


def test_a_long_episode_is_cut_where_it_differs(page: Page, served: Server) -> None:
    with httpx.Client(base_url=served.url) as client:
        made = client.post(
            "/v1/sessions", json={"env_id": "Count", "kwargs": {"length": 90}, "reset": {"seed": 5}}
        )
        path = f"/v1/sessions/{made.json()['session_id']}"
        for number in range(60):
            client.post(f"{path}/step", json={"action": str(number)}).raise_for_status()
        episode = client.get(f"{path}/episode").json()
        client.delete(path)
    episode["digests"][30] = "0" * 16
    page.goto("/console#/replay")
    choose(page, episode)
    expect(page.locator(".verdict")).to_contain_text("Differs at step 30")
    expect(page.locator("td.digest")).to_have_count(32)
    expect(page.locator("td.digest", has_text="✓ same")).to_have_count(31)
