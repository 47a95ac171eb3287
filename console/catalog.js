// The catalog: what the server offers.

import { alertBox, announce, button, fill, h, labelled } from "./dom.js";
import { describeKwarg } from "./kwargs.js";
import { describeSpace } from "./spaces.js";
import { pretty } from "./values.js";

export class CatalogView {
  constructor(app) {
    this.app = app;
    this.title = "Environments";
    this.problem = alertBox();
    this.list = h("ul", { class: "cards" });
    this.count = h("p", { class: "hint" });
    this.filter = h("input", { type: "search", autocomplete: "off", oninput: () => this.show() });
    this.element = h(
      "section",
      {},
      h("h1", { tabindex: "-1" }, "Environments"),
      h(
        "div",
        { class: "bar" },
        labelled("Find", this.filter),
        this.count,
        button("Refresh", () => this.refresh()),
      ),
      this.problem.element,
      this.list,
    );
    this.envs = [];
  }

  async start() {
    await this.refresh();
  }

  stop() {}

  async refresh() {
    this.problem.clear();
    try {
      this.envs = await this.app.environments();
    } catch (error) {
      this.problem.show(error);
      return;
    }
    this.show();
    announce(`${this.envs.length} environments`);
  }

  show() {
    const wanted = this.filter.value.trim().toLowerCase();
    const found = this.envs.filter((env) =>
      `${env.env_id} ${env.description}`.toLowerCase().includes(wanted),
    );
    fill(
      this.count,
      found.length === this.envs.length
        ? `${found.length} offered`
        : `${found.length} of ${this.envs.length}`,
    );
    fill(
      this.list,
      found.map(card),
      found.length === 0 &&
        h(
          "li",
          { class: "hint" },
          this.envs.length ? "None has this in its name." : nothingHere(this.app.info),
        ),
    );
  }
}

function nothingHere(info) {
  return info?.role === "gateway"
    ? "No server has registered an environment with this gateway yet."
    : "This server offers no environments.";
}

function card(env) {
  return h(
    "li",
    { class: "card" },
    h("div", { class: "bar" }, h("h2", {}, env.env_id), playLink(env)),
    h(
      "p",
      { class: "tags" },
      tagsOf(env).map((tag) => h("span", { class: "tag" }, tag)),
    ),
    h("p", {}, env.description || "No description."),
    h(
      "details",
      {},
      h("summary", {}, "Spaces and kwargs", h("span", { class: "hidden-text" }, ` of ${env.env_id}`)),
      facts(env),
      kwargsTable(env),
    ),
  );
}

function playLink({ env_id: name }) {
  return h(
    "a",
    { class: "go", href: `#/play/${encodeURIComponent(name)}`, "aria-label": `Play ${name}` },
    "Play",
  );
}

function tagsOf(env) {
  return [
    env.kind,
    env.origin === "registered"
      ? `registered, ${env.replicas} ${env.replicas === 1 ? "replica" : "replicas"}`
      : env.origin,
    env.deterministic ? "deterministic" : "not deterministic",
    `runs ${env.isolation}`,
  ];
}

function facts(env) {
  const rows = [
    ["Actions", told(env.metadata.actions, env.action_space)],
    ["Observations", told(env.metadata.observation, env.observation_space)],
    typeof env.metadata.reward === "string" && ["Reward", env.metadata.reward],
    ["Version", env.version],
    ["Longest episode", env.max_episode_steps === null ? "no limit" : `${env.max_episode_steps} steps`],
    ["Can be copied", env.forkable ? "yes" : "no"],
    ["Drawings", (env.metadata.render_modes ?? []).join(", ") || "none"],
  ];
  return h(
    "dl",
    { class: "facts" },
    rows.filter(Boolean).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );
}

/** What an environment says of what it takes or shows, behind the space. */
function told(words, space) {
  return typeof words === "string" ? `${describeSpace(space)}: ${words}` : describeSpace(space);
}

function kwargsTable(env) {
  const properties = Object.entries(env.kwargs_schema.properties ?? {});
  if (properties.length === 0) {
    const nothing = env.kwargs_schema.additionalProperties === false;
    return h(
      "p",
      { class: "hint" },
      nothing ? "A client may set no kwargs." : h("pre", {}, pretty(env.kwargs_schema)),
    );
  }
  return h(
    "table",
    {},
    h("caption", {}, "Kwargs that a client may set"),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "name"), h("th", { scope: "col" }, "allowed"))),
    h(
      "tbody",
      {},
      properties.map(([name, part]) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, name),
          h("td", {}, describeKwarg(part), part.description && h("br"), part.description),
        ),
      ),
    ),
  );
}
