"""What every page of the console has to hold: names of controls, contrast, narrow screens, texts that are no markup."""

from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.console import choose, episode_of, open_play
from tests.support.hostile_env import ATTRIBUTE, IMAGE, LINK, SCRIPT
from tests.support.wire import Server

PAGES = ("#/environments", "#/play/FrozenLake-v0", "#/replay", "#/server")


def test_the_calls_are_described_for_people(page: Page) -> None:
    page.goto("/console")
    page.get_by_role("link", name="HTTP calls").click()
    expect(page).to_have_title("HTTP calls · rollgym")
    make = page.locator("section", has=page.get_by_role("heading", name="POST /v1/sessions", exact=True))
    expect(make).to_contain_text("Make one session, or `count` of them")
    expect(make.get_by_role("row", name="kwargs object or null, optional")).to_be_visible()
    expect(page.get_by_role("heading", name="GET /v1/sessions/{session_id}/episode")).to_be_visible()
    assert page.evaluate(TOO_PALE) == []


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
