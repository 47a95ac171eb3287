"""Environments, found in the catalog and played by a person at a keyboard in a real browser."""

import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.console import open_play, open_play_again, tile
from tests.support.wire import Server


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


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ("ragen", "<answer>Down</answer>"),
        ("roll", "<answer>Down</answer>"),
        ("verl-agent", "<think></think><action>Down</action>"),
        ("gem", "\\boxed{Down}"),
    ],
)
def test_an_action_is_said_as_the_profile_wants_it(page: Page, profile: str, said: str) -> None:
    page.goto("/console#/play/FrozenLake-v0")
    page.get_by_text("Kwargs (16)").click()
    page.get_by_label("profile").select_option(label=f'"{profile}"')
    open_play_again(page)
    page.get_by_role("button", name="Down", exact=True).click()
    expect(page.get_by_role("row", name=f"0 {said}")).to_be_visible()
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


def test_a_call_says_what_its_format_cannot_write(page: Page, expected_complaints: list[str]) -> None:
    expected_complaints.append("status of 422")
    page.goto("/console#/play/Retail-v0")
    page.get_by_text("Kwargs (11)").click()
    page.get_by_label("call_format").select_option(label='"qwen-xml"')
    open_play_again(page)
    page.get_by_label("Tool", exact=True).select_option("find_user_by_name_and_zip")
    for label, text in (("first_name", "A</parameter><parameter=zip>"), ("last_name", "B"), ("zip", "1")):
        page.get_by_label(label).fill(text)
    page.get_by_role("button", name="Call").click()
    expect(page.get_by_role("alert")).to_contain_text("the format qwen-xml has no form for the call")
    expect(tile(page, "Steps")).to_have_text("0")
    page.get_by_label("first_name").fill("A")
    page.get_by_role("button", name="Call").click()
    expect(page.get_by_role("row", name="0 <tool_call>")).to_be_visible()


def test_tools_that_say_nothing_of_their_parameters_are_called_all_the_same(page: Page) -> None:
    open_play(page, "Undeclared")
    for name in ("look", "wait"):
        page.get_by_label("Tool", exact=True).select_option(name)
        page.get_by_role("button", name="Call").click()
        expect(page.get_by_role("row", name=f'"name": "{name}"')).to_be_visible()


@pytest.mark.parametrize("call_format", ["python", "tags"])
def test_calls_are_written_in_every_format_that_environments_read(page: Page, call_format: str) -> None:
    page.goto("/console#/play/Retail-v0")
    page.get_by_text("Kwargs (11)").click()
    page.get_by_label("call_format").select_option(label=f'"{call_format}"')
    open_play_again(page)
    page.get_by_label("Tool", exact=True).select_option("find_user_by_name_and_zip")
    for label, text in (("first_name", 'A "</tool_call>'), ("last_name", "B"), ("zip", "1")):
        page.get_by_label(label).fill(text)
    page.get_by_role("button", name="Call").click()
    # The tool ran: it is what found nobody.
    expect(page.get_by_role("region", name="Observation")).to_contain_text("no such user")


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
