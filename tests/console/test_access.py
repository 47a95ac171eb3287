"""Who reaches the console, and what a page elsewhere reaches: tokens, gateways, proxies, other sites."""

import http.server
import threading
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

from rollgym.env_server.access.tokens import add_token
from rollgym.env_server.http.console import Console
from tests.support.browser import Witness, chromium
from tests.support.processes import ROOT
from tests.support.wire import ENVS, INLINE, Server

CONSOLE = ROOT / "console"


def test_the_page_may_run_its_own_files_and_nothing_else(served: Server) -> None:
    with httpx.Client(base_url=served.url) as client:
        for path in ("/console", "/docs", "/console/app.js", "/console/style.css", "/console/icon.svg"):
            answer = client.get(path)
            assert answer.status_code == 200
            policy = dict(
                part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
            )
            assert (policy["default-src"], policy["script-src"], policy["style-src"]) == (
                "'none'",
                "'self'",
                "'self'",
            )
            assert (policy["frame-ancestors"], policy["base-uri"]) == ("'none'", "'none'")
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert client.head(path).headers["content-length"] == str(len(answer.content))
            again = client.get(path, headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert client.get("/console/app.js").headers["content-type"].startswith("text/javascript")
        for missing in (
            "/console/pages.py",
            "/console/__init__.py",
            "/console/../app.py",
            "/console/%2e%2e/app.py",
        ):
            assert client.get(missing).status_code == 404
        assert client.post("/console").status_code == 405


def test_only_browsers_are_led_to_the_console(served: Server) -> None:
    with httpx.Client(base_url=served.url) as client:
        led = client.get("/", headers={"Accept": "text/html,*/*;q=0.8"})
        assert (led.status_code, led.headers["location"]) == (303, "console")
        assert client.get("/").json()["code"] == "not_found"
        assert client.get("/console/").headers["location"] == "../console"


def test_every_file_is_shipped_and_needs_nobody_else() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    shipped = {path for pattern in patterns for path in CONSOLE.glob(pattern)}
    assets = {path for path in CONSOLE.iterdir() if path.is_file() and path.suffix != ".py"}
    assert shipped == assets
    assert {f"/console/{path.name}" for path in assets} - Console().paths == {
        "/console/index.html",
        "/console/calls.html",
    }
    for path in assets:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, f"{path.name} names no other site"
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            "localStorage",
            "cookie",
        ):
            assert way not in text, f"{path.name}: {way}"


def test_a_machine_without_a_browser_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        chromium()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        chromium()


def test_a_server_with_tokens_is_used_with_one(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    alice, root = add_token(file, "alice", ["play"]), add_token(file, "root", ["admin"])
    with (
        Server(*ENVS, *INLINE, "--token-file", str(file)) as server,
        browser.new_context(base_url=server.url) as context,
    ):
        page = context.new_page()
        witness = Witness(page)
        frames: list[str | bytes] = []
        page.on("websocket", lambda socket: socket.on("framesent", lambda frame: frames.append(frame)))
        page.goto("/console")
        dialog = page.get_by_role("dialog", name="Token")
        expect(dialog).to_contain_text("needs a token")
        expect(page.get_by_label("Bearer token")).to_be_focused()
        for token in ("wrong", alice):
            page.keyboard.type(token)
            page.keyboard.press("Enter")
            if token == "wrong":
                expect(dialog).to_contain_text("not known")
        expect(page.get_by_role("heading", name="Count", exact=True)).to_be_visible()
        page.goto("/console#/play/Count")
        page.get_by_role("button", name="Start the episode").press("Enter")
        expect(page.get_by_role("region", name="Observation")).to_contain_text("begin")
        assert frames[0] == f'{{"token":"{alice}","id":1,"op":"auth"}}'
        assert not any(alice in url for url in witness.requested)
        page.goto("/console#/server")
        expect(page.get_by_text("Rates need a token with the role admin.")).to_be_visible()
        kept = page.evaluate("[Object.values(sessionStorage), Object.keys(localStorage), document.cookie]")
        assert kept == [[alice], [], ""]
        page.reload()
        expect(page.get_by_text("Rates need a token with the role admin.")).to_be_visible()
        page.get_by_role("button", name="Token").press("Enter")
        page.keyboard.type(root)
        page.get_by_role("button", name="Use").click()
        expect(page.get_by_text("Operations a second")).to_be_visible()
        page.get_by_role("button", name="Token").press("Enter")
        page.get_by_role("button", name="Forget it").click()
        expect(dialog).to_contain_text("needs a token")
        assert page.evaluate("sessionStorage.length") == 0
        assert [
            each for each in witness.complaints if "status of 401" not in each and "403" not in each
        ] == []


def test_a_gateway_has_a_console(browser: Browser) -> None:
    with (
        Server("--gateway", "--allow-network", "loopback") as gateway,
        browser.new_context(base_url=gateway.url) as context,
    ):
        page = context.new_page()
        witness = Witness(page)
        page.goto("/console")
        expect(page.get_by_text("No server has registered an environment")).to_be_visible()
        with Server(*ENVS, *INLINE, "--register", gateway.url):
            registered = page.get_by_text("registered, 1 replica")
            for _ in range(100):
                page.get_by_role("button", name="Refresh").click()
                # A node registers its environments one after another, once it serves.
                if page.get_by_role("link", name="Play FrozenLake-v0").count():
                    break
                page.wait_for_timeout(100)
            expect(registered.first).to_be_visible()
            page.get_by_role("link", name="Play FrozenLake-v0").click()
            page.get_by_role("button", name="Start the episode").press("Enter")
            expect(page.get_by_role("button", name="Left")).to_be_focused()
            page.keyboard.press("ArrowLeft")
            expect(page.get_by_role("row", name="0 Left")).to_be_visible()
            page.get_by_role("button", name="Step through it").click()
            expect(page.get_by_text("Same: every digest of 1 step ")).to_be_visible()
            expect(page.get_by_text("gateway")).to_be_visible()
        assert witness.complaints == []


FOREIGN_PAGE = """<!DOCTYPE html><meta charset="utf-8"><title>elsewhere</title><pre id="seen"></pre>
<script type="module">
const target = "TARGET";
const body = JSON.stringify({ env_id: "Count" });
const seen = [];
const blind = { method: "POST", mode: "no-cors" };
await fetch(`${target}/v1/sessions`, { ...blind, headers: { "Content-Type": "text/plain" }, body });
await fetch(`${target}/v1/sessions`, { ...blind, body: new Blob([body]) });
for (const call of [{}, { method: "POST", headers: { "Content-Type": "application/json" }, body }]) {
  seen.push(await fetch(`${target}/v1/sessions`, call).then(() => "answered", () => "refused"));
}
seen.push(await new Promise((resolve) => {
  const socket = new WebSocket(`${target.replace("http", "ws")}/v1/ws`, ["rollgym.v1.json"]);
  socket.onopen = () => resolve("opened");
  socket.onerror = () => resolve("refused");
}));
const frame = document.createElement("iframe");
frame.src = `${target}/console`;
document.body.append(frame);
await new Promise((resolve) => { frame.onload = resolve; });
document.getElementById("seen").textContent = seen.join(" ");
</script>"""


class _Page(http.server.BaseHTTPRequestHandler):
    def __init__(self, content: bytes, *arguments: Any) -> None:
        self._content = content
        super().__init__(*arguments)

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self._content)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def test_a_page_elsewhere_gets_nothing_done(browser: Browser, served: Server) -> None:
    content = FOREIGN_PAGE.replace("TARGET", served.url).encode()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Page, content)) as elsewhere:
        threading.Thread(target=elsewhere.serve_forever, daemon=True).start()
        with browser.new_context() as context, httpx.Client(base_url=served.url) as client:
            before = client.get("/v1/info").json()["capacity"]["sessions"]
            page = context.new_page()
            page.goto(f"http://127.0.0.1:{elsewhere.server_address[1]}/")
            expect(page.locator("#seen")).to_have_text("refused refused refused")
            assert not page.frames[1].url.startswith(served.url), "no other page frames the console"
            assert client.get("/v1/info").json()["capacity"]["sessions"] <= before
        elsewhere.shutdown()
