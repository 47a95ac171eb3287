"""The console, used by a person at a keyboard in a real browser."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.browser import Witness, running_browser
from tests.support.hostile_env import ATTRIBUTE, IMAGE, LINK, SCRIPT
from tests.support.wire import ENVS, INLINE, Server

PAGES = ("#/environments", "#/play/FrozenLake-v0", "#/replay", "#/server")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as running:
        yield running


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    with Server(
        *ENVS,
        *INLINE,
        *("--env", "Hostile=tests.support.hostile_env:Hostile", "--isolation", "Hostile=inline"),
        *("--env", "tests.support.served_envs:Undrawable", "--isolation", "Undrawable=inline"),
        *("--gymnasium", "CartPole-v1", "--isolation", "CartPole-v1=inline"),
    ) as running:
        yield running


@pytest.fixture
def page(browser: Browser, served: Server) -> Iterator[Page]:
    """A page whose scripts must not complain."""
    with browser.new_context(base_url=served.url) as context:
        page = context.new_page()
        page.set_default_timeout(10_000)
        witness = Witness(page)
        yield page
        assert witness.complaints == []
        assert [url for url in witness.requested if not url.startswith((served.url, "blob:", "data:"))] == []


def open_play(page: Page, env_id: str, seed: int = 4) -> None:
    page.goto(f"/console#/play/{env_id}")
    open_play_again(page, seed)


def open_play_again(page: Page, seed: int = 4) -> None:
    """Begin an episode of what stands in the form."""
    page.get_by_label("Seed").fill(str(seed))
    page.get_by_role("button", name="Start the episode").press("Enter")
    expect(page.get_by_role("row", name=f"reset seed {seed}")).to_be_visible()


def tile(page: Page, name: str) -> Any:
    return page.locator(".tiles > div", has=page.get_by_text(name, exact=True)).locator("dd")


def episode_of(server: Server, *actions: str) -> dict[str, Any]:
    with httpx.Client(base_url=server.url) as client:
        made = client.post(
            "/v1/sessions", json={"env_id": "Count", "kwargs": {"length": 9}, "reset": {"seed": 5}}
        )
        path = f"/v1/sessions/{made.json()['session_id']}"
        for action in actions:
            client.post(f"{path}/step", json={"action": action}).raise_for_status()
        episode = client.get(f"{path}/episode").json()
        client.delete(path)
    return episode


def choose(page: Page, episode: Any) -> None:
    text = episode if isinstance(episode, str) else json.dumps(episode)
    file = {"name": "episode.json", "mimeType": "application/json", "buffer": text.encode()}
    page.get_by_label("Episode file").set_input_files(file)


def test_a_browser_is_led_to_the_catalog(page: Page) -> None:
    page.goto("/")
    expect(page).to_have_url(re.compile(r"/console$"))
    expect(page.get_by_role("heading", name="Environments", level=1)).to_be_visible()
    count = page.get_by_role("listitem").filter(has=page.get_by_role("heading", name="Count", exact=True))
    for text in ("episodic", "local", "deterministic", "runs inline", "Counts."):
        expect(count).to_contain_text(text)
    count.get_by_text("Spaces and kwargs").click()
    for text in ("any text", "Version7", "integer, ≥ 1, ≤ 100"):
        expect(count).to_contain_text(text)
    page.get_by_label("Find").fill("frozen")
    expect(page.get_by_role("heading", level=2)).to_have_text(["FrozenLake-v0"])
    expect(page).to_have_title("Environments · rollgym")


def test_frozen_lake_is_played_to_its_end_with_keys_alone(page: Page) -> None:
    page.goto("/console")
    expect(page.get_by_role("link", name="Play FrozenLake-v0")).to_be_visible()
    press_tab_until(page, "a[aria-label='Play FrozenLake-v0']")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_be_focused()
    press_tab_until(page, "input[type=number]")
    page.keyboard.type("4")
    press_tab_until(page, "button[type=submit]")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Left")).to_be_focused()
    expect(page.get_by_role("region", name="Observation")).to_have_text("P__O\n___O\n____\n___G")
    for step, key in enumerate(["Down", "Down", "Down", "Right", "Right", "Right"]):
        expect(page.locator(".choices button:focus")).to_be_visible()
        page.keyboard.press(f"Arrow{key}")
        expect(page.get_by_role("row", name=f"{step} {key}")).to_be_visible()
    expect(tile(page, "State")).to_have_text("terminated, success")
    expect(tile(page, "Return")).to_have_text("1")
    expect(page.locator("#announcer")).to_contain_text("Step 5: reward 1, terminated, success")
    expect(page.get_by_role("button", name="Left")).to_be_disabled()
    expect(page.get_by_role("button", name="Another episode")).to_be_focused()
    page.keyboard.press("Enter")
    expect(tile(page, "Steps")).to_have_text("0")
    expect(page.get_by_role("button", name="Left")).to_be_focused()


def press_tab_until(page: Page, selector: str) -> None:
    for _ in range(60):
        page.keyboard.press("Tab")
        focused = page.locator("*:focus")
        assert focused.count() == 1, "the focus is never lost"
        assert focused.evaluate("e => parseFloat(getComputedStyle(e).outlineWidth)") >= 2, "and always seen"
        if focused.evaluate("(e, selector) => e.matches(selector)", selector):
            return
    raise AssertionError(f"the focus does not come to {selector}")


def test_replies_are_typed_and_kwargs_are_set(page: Page) -> None:
    page.goto("/console#/play/Count")
    page.get_by_text("Kwargs (1)").click()
    page.get_by_label("length").fill("2")
    page.get_by_role("button", name="Start the episode").click()
    reply = page.get_by_label("Reply")
    expect(reply).to_be_focused()
    reply.fill("special")
    reply.press("Enter")
    expect(page.get_by_role("region", name="Observation")).to_have_text("1 special")
    page.get_by_text("Info", exact=True).click()
    expect(page.locator("details pre")).to_contain_text('"array": "int64 [3]  0  1  2"')
    reply.fill("two\nlines")
    page.get_by_role("button", name="Send").click()
    expect(tile(page, "State")).to_have_text("terminated")
    expect(page.locator(".history")).to_contain_text("two\nlines")


def test_what_the_server_refuses_is_told_where_it_was_typed(page: Page) -> None:
    page.goto("/console#/play/Count")
    page.get_by_text("Kwargs (1)").click()
    page.get_by_label("length").fill("101")
    page.get_by_role("button", name="Start the episode").click()
    expect(page.get_by_role("alert")).to_contain_text("length: Value must be less than or equal to 100")
    expect(page.get_by_label("length")).to_be_focused()
    page.get_by_label("length").fill("13")
    page.get_by_role("button", name="Start the episode").click()
    expect(page.get_by_role("alert")).to_contain_text("thirteen brings bad luck")
    page.get_by_label("length").fill("3")
    page.get_by_text("Options of the reset").click()
    page.get_by_label("Options", exact=True).fill("[1]")
    page.get_by_role("button", name="Start the episode").click()
    expect(page.get_by_role("alert")).to_contain_text("expected a JSON object")
    page.get_by_label("Options", exact=True).fill('{"expert": false}')
    page.get_by_role("button", name="Start the episode").click()
    expect(page.get_by_role("region", name="Observation")).to_contain_text("begin")
    page.get_by_label("Reply").fill("raise")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_contain_text("env_error")


def test_a_shop_is_played_by_the_names_of_its_products(page: Page) -> None:
    open_play(page, "WebShop-v0")
    assert "pillow cover" in page.get_by_label("search").input_value()
    page.get_by_role("button", name="search", exact=True).click()
    page.get_by_role("button", name=re.compile(r"Pillow Cover, \$8.82")).click()
    page.get_by_role("button", name="size: 18x18").click()
    expect(page.get_by_role("button", name="size: 18x18 ✓")).to_be_visible()
    page.get_by_role("button", name="buy now").click()
    expect(tile(page, "State")).to_have_text(re.compile("^terminated"))
    expect(page.get_by_role("row", name="3 click[buy now]")).to_be_visible()
    page.get_by_role("button", name="Another episode").press("Enter")
    expect(page.get_by_role("button", name="search", exact=True)).to_be_visible()


def test_an_action_is_said_as_the_profile_wants_it(page: Page) -> None:
    page.goto("/console#/play/FrozenLake-v0")
    page.get_by_text("Kwargs (16)").click()
    page.get_by_label("profile").select_option(label='"verl-agent"')
    open_play_again(page)
    page.get_by_role("button", name="Down", exact=True).click()
    expect(page.get_by_role("row", name="0 <think></think><action>Down</action>")).to_be_visible()
    expect(tile(page, "State")).to_have_text("in play")


def test_tools_are_called_by_forms(page: Page) -> None:
    page.goto("/console#/play/Retail-v0")
    page.get_by_text("Kwargs (11)").click()
    page.get_by_label("cancel").check()
    open_play_again(page)
    expect(page.get_by_role("region", name="Observation")).to_contain_text("cancel")
    told = page.get_by_role("region", name="Instruction")
    expect(told).to_contain_text("First find out who the customer is")
    expect(told).not_to_contain_text("tool_call")
    page.get_by_label("Tool", exact=True).select_option("find_user_by_name_and_zip")
    page.get_by_label("first_name").fill("Nobody")
    page.get_by_role("button", name="Call").click()
    expect(page.get_by_role("alert")).to_contain_text("last_name: is needed")
    expect(page.get_by_label("last_name")).to_be_focused()
    page.get_by_label("last_name").fill('O"Hara')
    page.get_by_label("zip").fill("12345")
    page.get_by_role("button", name="Call").click()
    expect(page.get_by_role("region", name="Observation")).to_contain_text("tool_response")
    expect(tile(page, "State")).to_have_text("in play")


def test_a_program_is_written_in_lines_and_sent_in_a_block(page: Page) -> None:
    open_play(page, "Code-v0")
    reply = page.get_by_label("Reply in python")
    expect(reply).to_be_focused()
    assert reply.input_value().startswith("def last_standing(")
    reply.press("Enter")
    expect(tile(page, "Steps")).to_have_text("0")
    begun = reply.input_value()
    page.keyboard.press("Control+Enter")
    # Whether or not there is a sandbox here, the reply has gone out as it should.
    expect(page.get_by_role("row", name="0 ```python").or_(page.get_by_role("alert"))).to_be_visible(
        timeout=60_000
    )
    assert reply.input_value() == begun


def test_prose_is_broken_and_drawings_are_not(browser: Browser, served: Server) -> None:
    with browser.new_context(base_url=served.url, viewport={"width": 640, "height": 800}) as context:
        page = context.new_page()
        for env_id, drawn in (("WebShop-v0", False), ("Retail-v0", False), ("Sokoban-v0", True)):
            open_play(page, env_id)
            text = page.locator(".observation pre")
            assert text.evaluate("each => each.classList.contains('drawing')") is drawn, env_id
            assert text.evaluate("each => each.scrollWidth <= each.clientWidth"), env_id


def test_numbers_are_buttons_and_arrays_are_json(page: Page) -> None:
    open_play(page, "CartPole-v1")
    expect(page.get_by_role("region", name="Observation")).to_contain_text("float32 [4]")
    expect(page.get_by_role("button", name="0", exact=True)).to_be_focused()
    page.keyboard.press("1")
    expect(page.get_by_role("row", name="0 1 1 float32 [4]")).to_be_visible()
    open_play(page, "Arrays")
    send = page.get_by_role("button", name="Send")
    expect(page.get_by_label("JSON")).to_have_value('{"push":[0,0],"key":1}')
    page.get_by_label("JSON").fill('{"push":[0.5,0.25],"key":3')
    send.click()
    expect(page.get_by_role("alert")).to_contain_text("expected JSON")
    page.get_by_label("JSON").fill('{"push":[0.5,0.25],"key":7}')
    send.click()
    expect(page.get_by_role("alert")).to_contain_text("invalid_action")
    page.get_by_label("JSON").fill('{"push":[0.5,0.25],"key":3}')
    send.click()
    expect(tile(page, "Return")).to_have_text("0.75")
    expect(page.get_by_role("img", name="Picture of 40 by 40 pixels")).to_be_visible()
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_drawing_that_breaks_the_episode_says_so(page: Page) -> None:
    open_play(page, "Undrawable")
    expect(page.get_by_label("Draw each step")).not_to_be_checked()
    page.get_by_label("Draw each step").press("Space")
    expect(page.get_by_role("alert")).to_contain_text("env_error")
    open_play(page, "FrozenLake-v0")
    expect(page.get_by_role("img", name=re.compile("Picture of"))).to_be_visible()


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


def test_the_calls_are_described_for_people(page: Page) -> None:
    page.goto("/console")
    page.get_by_role("link", name="HTTP calls").click()
    expect(page).to_have_title("HTTP calls · rollgym")
    make = page.locator("section", has=page.get_by_role("heading", name="POST /v1/sessions", exact=True))
    expect(make).to_contain_text("Make one session, or `count` of them")
    expect(make.get_by_role("row", name="kwargs object or null, optional")).to_be_visible()
    expect(page.get_by_role("heading", name="GET /v1/sessions/{session_id}/episode")).to_be_visible()
    assert page.evaluate(TOO_PALE) == []


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


def test_no_text_of_an_environment_becomes_a_part_of_the_page(page: Page, served: Server) -> None:
    page.goto("/console")
    expect(page.get_by_text(IMAGE + SCRIPT)).to_be_visible()
    page.locator("li", has=page.get_by_role("heading", name="Hostile")).get_by_text(
        "Spaces and kwargs"
    ).click()
    expect(page.get_by_role("rowheader", name=ATTRIBUTE)).to_be_visible()
    open_play(page, "Hostile")
    expect(page.get_by_role("region", name="Observation")).to_have_text(IMAGE + SCRIPT)
    expect(page.locator(".instruction")).to_have_text(SCRIPT + IMAGE)
    page.get_by_label("Draw each step").check()
    expect(page.locator(".frame")).to_have_text(SCRIPT + IMAGE)
    page.get_by_text("Info", exact=True).click()
    expect(page.locator("details pre")).to_contain_text(IMAGE.replace('"', '\\"'))
    page.get_by_role("button", name=ATTRIBUTE).click()
    expect(page.get_by_role("region", name="Observation")).to_have_text(ATTRIBUTE * 2)
    page.get_by_role("button", name="Step through it").click()
    expect(page.get_by_text("Same: every digest of 1 step ")).to_be_visible()
    open_play(page, "Hostile")
    page.get_by_role("button", name=LINK).click()
    expect(page.get_by_role("alert")).to_contain_text(IMAGE)
    episode = {**episode_of(served), "env_id": IMAGE, "env_version": SCRIPT}
    page.goto("/console#/replay")
    choose(page, episode)
    expect(page.get_by_role("alert")).to_contain_text("unknown_env")
    page.goto(f"/console#/play/{IMAGE}")
    expect(page.get_by_role("alert")).to_contain_text("there is no environment")
    assert page.evaluate("window.stolen") is None
    assert page.locator("img[src*=stolen], main svg[onload], main script").count() == 0


def test_a_connection_that_breaks_costs_no_step(page: Page) -> None:
    sockets: list[Any] = []

    def take(socket: Any) -> None:
        sockets.append(socket)
        socket.connect_to_server()

    page.route_web_socket("**/v1/ws", take)
    open_play(page, "FrozenLake-v0")
    expect(page.get_by_role("button", name="Left")).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(tile(page, "Steps")).to_have_text("1")
    sockets[0].close()
    page.keyboard.press("ArrowDown")
    expect(tile(page, "Steps")).to_have_text("2")
    expect(page.get_by_role("alert")).to_be_hidden()
    assert len(sockets) == 2


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


def test_the_reader_sees_and_ends_the_sessions_of_the_server(page: Page, served: Server) -> None:
    with httpx.Client(base_url=served.url) as client:
        made = client.post("/v1/sessions", json={"env_id": "Count", "reset": {"seed": 5}}).json()[
            "session_id"
        ]
        page.goto("/console#/server")
        row = page.get_by_role("row").filter(has_text=made)
        expect(row).to_contain_text("in play")
        expect(page.get_by_role("meter", name="Sessions of those allowed")).to_be_visible()
        expect(tile(page, "Role")).to_have_text("server")
        expect(tile(page, "Steps a second")).to_be_visible()
        with page.expect_download() as downloading:
            row.get_by_role("button", name="Download the episode").click()
        assert downloading.value.suggested_filename == "Count-seed5-0steps.json"
        row.get_by_role("button", name="Close session").click()
        expect(row).to_have_count(0)
        assert client.get(f"/v1/sessions/{made}").status_code == 410


def test_the_server_is_asked_again_only_after_it_has_answered(page: Page) -> None:
    page.clock.install()
    asked: list[Any] = []
    page.route("**/v1/sessions?*", lambda route: asked.append(route))
    page.goto("/console#/server")
    expect(page.get_by_text("of 4096 sessions")).to_be_visible()
    page.clock.fast_forward(60_000)
    page.clock.fast_forward(60_000)
    assert len(asked) == 1, "the first question is not answered yet"
    asked[0].fulfill(json={"sessions": []})
    expect(page.get_by_text("None is open.")).to_be_visible()
    expect(page.get_by_text("The first rates come in a moment.")).to_be_visible()
    page.clock.fast_forward(2_000)
    assert len(asked) == 1, "and then there is a pause"
    with page.expect_request("**/v1/sessions?*"):
        page.clock.fast_forward(2_000)
    page.get_by_role("link", name="Replay").click()
    for route in asked[1:]:
        route.fulfill(json={"sessions": []})
    page.clock.fast_forward(60_000)
    assert len(asked) == 2, "another page asks for nothing"


def names_of_controls(page: Page) -> list[tuple[str, str]]:
    """Role and accessible name of all that can have the focus, as a screen reader is told."""
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")
    found = []
    for node in tree["nodes"]:
        properties = {each["name"]: each["value"].get("value") for each in node.get("properties", [])}
        role = node.get("role", {}).get("value", "")
        if properties.get("focusable") and not node.get("ignored") and role not in ("RootWebArea", "main"):
            found.append((role, node.get("name", {}).get("value", "")))
    return found


TOO_PALE = """() => {
  const parse = (text) => [...text.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
  const linear = (part) => (part /= 255) <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour[3] > 0) return colour;
    }
    return [255, 255, 255, 1];
  };
  const pale = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!text || !element.checkVisibility() || element.closest("noscript, script")) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(ground(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) pale.push(`${element.tagName} ${element.textContent.slice(0, 40)} ${ratio.toFixed(2)}`);
  }
  return pale;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_control_has_a_name_and_every_text_is_readable(
    browser: Browser, served: Server, scheme: Any
) -> None:
    with browser.new_context(
        base_url=served.url,
        color_scheme=scheme,
        reduced_motion="reduce",  # a colour on its way to another one is no colour to judge
    ) as context:
        page = context.new_page()
        for address in PAGES:
            page.goto(f"/console{address}")
            expect(page.locator("main h1")).to_be_visible()
            if address.startswith("#/play"):
                open_play(page, "FrozenLake-v0")
                page.get_by_text("Kwargs (16)").click()
            if address == "#/replay":
                choose(page, episode_of(served, "a", "b"))
                expect(page.get_by_text("Same:")).to_be_visible()
            controls = names_of_controls(page)
            assert len(controls) > 8
            assert [control for control in controls if not control[1].strip()] == []
            assert page.evaluate(TOO_PALE) == []
        page.get_by_role("button", name="Token").press("Enter")
        expect(page.get_by_label("Bearer token")).to_be_focused()
        assert [control for control in names_of_controls(page) if not control[1].strip()] == []
        assert page.evaluate(TOO_PALE) == []
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Token")).to_be_focused()


def test_a_narrow_screen_needs_no_sideways_scrolling(browser: Browser, served: Server) -> None:
    with browser.new_context(base_url=served.url, viewport={"width": 340, "height": 640}) as context:
        page = context.new_page()
        for address in PAGES:
            page.goto(f"/console{address}")
            expect(page.locator("main h1")).to_be_visible()
            if address.startswith("#/play"):
                open_play(page, "FrozenLake-v0")
            if address == "#/replay":
                choose(page, episode_of(served, "a", "b"))
                expect(page.get_by_text("Same:")).to_be_visible()
            if address == "#/environments":
                for summary in page.locator("summary").all():
                    summary.click()
            assert page.evaluate("document.scrollingElement.scrollWidth") <= 340, address
