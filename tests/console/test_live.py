"""What a server does now, as the console shows it."""

from typing import Any

import httpx
from playwright.sync_api import Page, expect

from tests.support.console import tile
from tests.support.wire import Server


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
