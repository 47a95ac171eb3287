"""What a person does in the console, in tests."""

import json
from typing import Any

import httpx
from playwright.sync_api import Page, expect

from tests.support.wire import Server


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
