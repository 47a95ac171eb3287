// What the server does now: capacity, rates, and the reader's own sessions.

import { alertBox, announce, button, download, fill, h } from "./dom.js";
import { fileName } from "./episode.js";
import { parseMetrics, total, totalsBy } from "./prometheus.js";
import { shortNumber } from "./values.js";

// One round of questions at a time; the next begins so long after the last was answered, and not while the page is
// hidden.
const PAUSE_MS = 3000;
const PAUSE_AFTER_FAILURE_MS = 15000;
const KEPT = 60;
const PAGE = 100;
const RATES = [
  ["Steps", "rollgym_steps_total"],
  ["Episodes begun", "rollgym_resets_total"],
  ["Operations", "rollgym_operations_total"],
  ["Problems", "rollgym_problems_total"],
];

export class LiveView {
  constructor(app) {
    this.app = app;
    this.title = "Server";
    this.problem = alertBox();
    this.server = h("dl", { class: "tiles" });
    this.meter = h("meter", { min: "0", "aria-label": "Sessions of those allowed" });
    this.capacity = h("p");
    this.rates = h("dl", { class: "tiles" });
    this.chart = chart();
    this.noRates = h("p", { class: "hint" });
    this.perEnv = h("tbody");
    this.sessions = h("tbody");
    this.more = h("p", { class: "hint" });
    this.hidden = () => this.schedule(document.hidden ? null : 0);
    this.element = h(
      "section",
      {},
      h("h1", { tabindex: "-1" }, "Server"),
      this.problem.element,
      this.server,
      h("div", { class: "card" }, h("h2", {}, "Capacity"), this.capacity, this.meter),
      h(
        "div",
        { class: "card" },
        h("h2", {}, "Rates"),
        this.noRates,
        this.rates,
        this.chart.element,
        tableOf("By environment", ["environment", "sessions", "steps a second"], this.perEnv),
      ),
      h(
        "div",
        { class: "card" },
        h("h2", {}, "Your sessions"),
        tableOf(
          "Your sessions",
          ["environment", "session", "episode", "step", "state", "idle", "do"],
          this.sessions,
        ),
        this.more,
      ),
    );
    this.before = null;
    this.history = [];
  }

  async start() {
    document.addEventListener("visibilitychange", this.hidden);
    await this.round();
  }

  stop() {
    this.stopped = true;
    document.removeEventListener("visibilitychange", this.hidden);
    this.schedule(null);
  }

  /** Ask again after a while; never again where the pause is null. */
  schedule(pause) {
    clearTimeout(this.timer);
    if (pause !== null && !this.stopped && !document.hidden && !this.asking)
      this.timer = setTimeout(() => this.round(), pause);
  }

  async round() {
    this.asking = true;
    let pause = PAUSE_MS;
    try {
      this.showServer(await this.app.readInfo());
      await this.readSessions();
      await this.readRates();
      this.problem.clear();
    } catch (error) {
      // Without a token there is nothing to ask for; the page begins anew when there is one.
      pause =
        error.code === "unauthorized"
          ? null
          : Math.max(PAUSE_AFTER_FAILURE_MS, 1000 * (error.problem?.retry_after ?? 0));
      this.problem.show(error);
    }
    this.asking = false;
    this.schedule(pause);
  }

  showServer(info) {
    const { sessions, max_sessions: most } = info.capacity;
    fill(
      this.server,
      tilesOf([
        ["Role", info.role],
        ["Version", info.version],
        ["I/O processes", info.processes],
        ["Step time-out", `${info.limits.step_timeout_s} s`],
      ]),
    );
    this.capacity.textContent = `${sessions} of ${most} sessions`;
    this.meter.max = most;
    this.meter.value = sessions;
  }

  async readSessions() {
    const page = await this.app.server.json(`v1/sessions?limit=${PAGE}`);
    keepRows(
      this.sessions,
      page.sessions,
      (each) => each.session_id,
      (each) => this.sessionRow(each),
      7,
      "None is open.",
    );
    fill(this.more, page.after && `The first ${PAGE} are shown.`);
  }

  sessionRow(session) {
    const row = h(
      "tr",
      {},
      h("th", { scope: "row" }, session.env_id),
      h("td", { class: "digest" }, session.session_id),
    );
    const cells = ["episode", "step", "state", "idle"].map(() => h("td"));
    const short = session.session_id.slice(0, 8);
    const actions = h(
      "div",
      { class: "row" },
      button("Episode", () => this.save(session), {
        "aria-label": `Download the episode of session ${short}`,
      }),
      button("Close", () => this.close(session), { "aria-label": `Close session ${short}` }),
    );
    row.append(...cells, h("td", {}, actions));
    const update = (now) => {
      const end = [now.terminated && "terminated", now.truncated && "truncated"].filter(Boolean).join(", ");
      const texts = [
        now.episode ?? "–",
        now.step ?? "–",
        end || (now.episode === null ? "not begun" : "in play"),
        `${Math.round(now.idle_s)} s`,
      ];
      texts.forEach((text, index) => {
        cells[index].textContent = text;
      });
    };
    return { row, update };
  }

  async save(session) {
    await this.act(async () => {
      const text = await this.app.server.text(`v1/sessions/${session.session_id}/episode`);
      download(fileName(JSON.parse(text)), text);
    });
  }

  async close(session) {
    await this.act(async () => {
      await this.app.server.text(`v1/sessions/${session.session_id}`, "DELETE");
      announce(`Session of ${session.env_id} closed`);
      await this.readSessions();
      // Its button is gone, and the focus with it.
      this.element.querySelector("h1").focus();
    });
  }

  async act(deed) {
    try {
      await deed();
    } catch (error) {
      this.problem.show(error);
    }
  }

  async readRates() {
    let text;
    try {
      text = await this.app.server.text("metrics");
    } catch (error) {
      if (error.code !== "forbidden") throw error;
      fill(this.noRates, "Rates need a token with the role admin.");
      return;
    }
    const now = { at: performance.now(), samples: parseMetrics(text) };
    if (this.before === null) fill(this.noRates, "The first rates come in a moment.");
    else this.showRates(this.before, now);
    this.before = now;
  }

  showRates(before, now) {
    const seconds = (now.at - before.at) / 1000;
    // A server that was started anew counts from zero.
    const rate = (after, earlier) => Math.max(0, after - earlier) / seconds;
    const rates = RATES.map(([name, metric]) => [
      name,
      rate(total(now.samples, metric), total(before.samples, metric)),
    ]);
    const cpu = rate(
      total(now.samples, "process_cpu_seconds_total"),
      total(before.samples, "process_cpu_seconds_total"),
    );
    fill(this.noRates);
    fill(
      this.rates,
      tilesOf([
        ...rates.map(([name, value]) => [`${name} a second`, shortNumber(round(value))]),
        ["CPU", `${Math.round(100 * cpu)} %`],
      ]),
    );
    this.history = [...this.history, rates[0][1]].slice(-KEPT);
    this.chart.draw(this.history);
    const [steps, earlier] = [now, before].map((each) =>
      totalsBy(each.samples, "rollgym_steps_total", "env_id"),
    );
    const sessions = totalsBy(now.samples, "rollgym_sessions", "env_id");
    const names = [...new Set([...sessions.keys(), ...steps.keys()])].sort();
    const rows = names.map((name) => [
      name,
      sessions.get(name) ?? 0,
      shortNumber(round(rate(steps.get(name) ?? 0, earlier.get(name) ?? 0))),
    ]);
    fill(
      this.perEnv,
      rows.map(([name, ...values]) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, name),
          values.map((value) => h("td", { class: "number" }, value)),
        ),
      ),
    );
  }
}

function round(value) {
  return Math.round(value * 10) / 10;
}

function tilesOf(rows) {
  return rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
}

function tableOf(caption, names, body) {
  const head = h(
    "thead",
    {},
    h(
      "tr",
      {},
      names.map((name) => h("th", { scope: "col" }, name)),
    ),
  );
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "hidden-text" }, caption), head, body),
  );
}

/** Keep the rows of a table that are there already: the focus may be in one. */
function keepRows(body, items, keyOf, make, columns, nothing) {
  const kept = new Map([...body.children].filter((row) => row.update).map((row) => [row.dataset.key, row]));
  const rows = items.map((item) => {
    let row = kept.get(keyOf(item));
    if (row === undefined) {
      const made = make(item);
      row = made.row;
      row.dataset.key = keyOf(item);
      row.update = made.update;
    }
    row.update(item);
    return row;
  });
  const wanted = rows.length ? rows : [h("tr", {}, h("td", { colspan: columns, class: "hint" }, nothing))];
  for (const row of [...body.children]) if (!wanted.includes(row)) row.remove();
  wanted.forEach((row, index) => {
    if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null);
  });
}

const SVG = "http://www.w3.org/2000/svg";

/** A line of the last rates. */
function chart() {
  const line = document.createElementNS(SVG, "polyline");
  const drawing = document.createElementNS(SVG, "svg");
  drawing.setAttribute("viewBox", `0 0 ${KEPT - 1} 20`);
  drawing.setAttribute("preserveAspectRatio", "none");
  drawing.setAttribute("role", "img");
  drawing.append(line);
  const element = h("figure", { hidden: true }, drawing, h("figcaption", { class: "hint" }));
  return {
    element,
    draw(values) {
      const most = Math.max(...values, 1);
      line.setAttribute(
        "points",
        values.map((value, index) => `${KEPT - values.length + index},${19 - (18 * value) / most}`).join(" "),
      );
      const text = `Steps a second, at most ${shortNumber(round(most))}`;
      drawing.setAttribute("aria-label", text);
      element.lastElementChild.textContent = text;
      element.hidden = values.length < 2;
    },
  };
}
