// The console: its pages by the address after `#`, the token, and what the pages share.

import { CatalogView } from "./catalog.js";
import { announce, fill } from "./dom.js";
import { LiveView } from "./live.js";
import { PlayView } from "./play.js";
import { ReplayView } from "./replay.js";
import { Problem, Server } from "./wire.js";

const FIRST = "#/environments";
const PAGES = {
  environments: (app) => new CatalogView(app),
  play: (app, envId) => new PlayView(app, envId),
  replay: (app) => new ReplayView(app),
  server: (app) => new LiveView(app),
};

class App {
  constructor() {
    // The page may stand under a path of a proxy; its scripts know where.
    this.server = new Server(new URL("..", import.meta.url));
    this.server.onunauthorized = (problem) => this.askForToken(problem.message);
    this.main = document.getElementById("main");
    this.where = document.getElementById("where");
    this.view = null;
    this.info = null;
    /** An episode that one page hands to another. */
    this.episode = null;
    this.dialog = document.getElementById("token-dialog");
    this.input = document.getElementById("token-input");
    document.getElementById("token-button").addEventListener("click", () => this.askForToken());
    this.dialog.addEventListener("close", () => this.takeToken());
    document.getElementById("skip").addEventListener("click", (event) => {
      // The address after `#` is the page's.
      event.preventDefault();
      this.main.focus();
    });
    addEventListener("hashchange", () => this.route(true));
  }

  async run() {
    await this.readInfo().catch(() => {
      // The page that is shown says what is wrong.
    });
    this.route(false);
  }

  go(address) {
    if (location.hash === address) this.route(true);
    else location.hash = address;
  }

  route(moved) {
    const [, name = "", ...rest] = (location.hash || FIRST).split("/");
    const page = PAGES[name];
    if (page === undefined) {
      this.go(FIRST);
      return;
    }
    this.view?.stop();
    this.view = page(this, readName(rest.join("/")));
    document.title = `${this.view.title} · rollgym`;
    for (const link of document.querySelectorAll("nav a")) {
      if (link.hash === `#/${name}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    fill(this.main, this.view.element);
    // Who follows a link goes on at the new page; who has just opened it begins at its top.
    if (moved) this.view.element.querySelector("h1").focus();
    this.view.start();
  }

  // -- the server

  async readInfo() {
    this.info = await this.server.json("v1/info");
    this.where.textContent = `${this.info.role} ${this.info.version} at ${location.host}`;
    return this.info;
  }

  async environments() {
    const { envs } = await this.server.json("v1/envs");
    return envs;
  }

  /** Close a session that nobody waits for. */
  closeLater(session) {
    this.server.call("close", { session_id: session }).catch((error) => {
      if (!(error instanceof Problem)) throw error;
    });
  }

  // -- the token

  askForToken(reason) {
    if (this.dialog.open) return;
    if (reason)
      document.getElementById("token-reason").textContent =
        `${reason}. The page keeps the token until the tab is closed, and no longer.`;
    this.dialog.returnValue = "cancel";
    this.input.value = "";
    this.dialog.showModal();
    this.input.focus();
  }

  takeToken() {
    const choice = this.dialog.returnValue;
    const token = this.input.value.trim();
    this.input.value = "";
    if (choice === "forget") this.server.token = "";
    else if (choice === "use" && token) this.server.token = token;
    else return;
    announce(choice === "forget" ? "Token forgotten" : "Token saved");
    this.run();
  }
}

function readName(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

await new App().run();
