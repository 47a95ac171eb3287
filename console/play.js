// Playing an environment by hand.

import { ActionControls, describeAction } from "./actions.js";
import { alertBox, announce, button, download, fill, h, labelled } from "./dom.js";
import { fileName } from "./episode.js";
import { FormError, kwargsFields, parseObject } from "./kwargs.js";
import { inLine, pretty, shortNumber, showValue } from "./values.js";

const MOST_SEED = 2 ** 53 - 1;

export class PlayView {
  /** @param {string} envId the environment to begin with; empty: the first one */
  constructor(app, envId) {
    this.app = app;
    this.title = envId ? `Play ${envId}` : "Play";
    this.wanted = envId;
    this.session = null;
    this.turns = Promise.resolve();
    this.problem = alertBox();
    this.setup = h("form", {
      class: "card setup",
      "aria-label": "Episode",
      novalidate: true,
      onsubmit: (event) => this.begin(event),
    });
    this.stage = h("section", { class: "stage", "aria-label": "Episode in play", hidden: true });
    this.element = h(
      "section",
      {},
      h("h1", { tabindex: "-1" }, "Play"),
      this.problem.element,
      h("div", { class: "columns" }, this.setup, this.stage),
    );
  }

  async start() {
    let envs;
    try {
      envs = await this.app.environments();
    } catch (error) {
      this.problem.show(error);
      return;
    }
    this.envs = new Map(envs.map((env) => [env.env_id, env]));
    if (this.envs.size === 0) {
      fill(this.setup, h("p", {}, "The server offers no environments."));
      return;
    }
    const select = h(
      "select",
      { onchange: () => this.app.go(`#/play/${encodeURIComponent(select.value)}`) },
      envs.map((env) => h("option", {}, env.env_id)),
    );
    const known = this.envs.has(this.wanted);
    if (this.wanted && !known) this.problem.show(new Error(`there is no environment ${this.wanted}`));
    select.value = known ? this.wanted : envs[0].env_id;
    this.show(select);
  }

  /** The form for the chosen environment. */
  show(select) {
    this.env = this.envs.get(select.value);
    this.seed = h("input", {
      type: "number",
      min: "0",
      max: MOST_SEED,
      step: "1",
      placeholder: "drawn by the server",
    });
    this.options = h("textarea", { rows: "2", spellcheck: "false" });
    this.kwargs = kwargsFields(this.env.kwargs_schema);
    fill(
      this.setup,
      labelled("Environment", select),
      h("p", {}, this.env.description),
      labelled("Seed", this.seed),
      this.kwargs.count > 0 &&
        h("details", {}, h("summary", {}, `Kwargs (${this.kwargs.count})`), this.kwargs.elements),
      h(
        "details",
        {},
        h("summary", {}, "Options of the reset"),
        labelled("Options", this.options, "JSON object; what the environment takes"),
      ),
      h("button", { type: "submit", class: "primary" }, "Start the episode"),
    );
  }

  async begin(event) {
    event.preventDefault();
    // Whoever presses twice wants one session.
    if (this.beginning) return;
    this.beginning = true;
    this.problem.clear();
    try {
      const env = this.env;
      const reset = this.readReset();
      const kwargs = this.kwargs.read();
      const manner = await mannerOf(this.app.server, env, kwargs);
      await this.turns;
      await this.close();
      const made = await this.app.server.call("make", { env_id: env.env_id, kwargs });
      this.session = new Session(this.app.server, made);
      // Whoever leaves the page before it is made wants no session.
      if (this.stopped) await this.close();
      else {
        this.stageFor(made, env, manner);
        await this.run(
          (session) => session.reset(reset),
          () => this.begun(),
        );
      }
    } catch (error) {
      this.refuse(error);
    } finally {
      this.beginning = false;
    }
  }

  readReset() {
    if (!this.seed.checkValidity()) throw new FormError(`seed: ${this.seed.validationMessage}`, this.seed);
    const options = parseObject("options", this.options);
    const wished = { ...this.labels(), ...options };
    return {
      ...(this.seed.value && { seed: Number(this.seed.value) }),
      ...(Object.keys(wished).length && { options: wished }),
    };
  }

  /** The option of a reset that has actions named for people, where the environment knows it. */
  labels() {
    const { reset_options: known } = this.env.metadata;
    return Array.isArray(known) && known.includes("labels") ? { labels: true } : {};
  }

  begun() {
    this.controls.focus({ preventScroll: true });
    // On a narrow page the form stands above what it began.
    if (this.stage.getBoundingClientRect().top > window.innerHeight / 2) this.stage.scrollIntoView();
  }

  /** Lay out the stage of a session. */
  stageFor(made, env, manner) {
    this.spaces = { action: made.action_space, observation: made.observation_space };
    this.observation = h("div", { class: "observation", "aria-label": "Observation", role: "region" });
    this.frame = h("div", { class: "frame" });
    this.instruction = h("p", {
      class: "instruction",
      tabindex: "0",
      role: "region",
      "aria-label": "Instruction",
    });
    this.facts = h("dl", { class: "tiles" });
    this.info = h("pre");
    this.history = h("tbody");
    this.controls = new ActionControls(
      made.action_space,
      manner,
      (action) => this.act(action),
      (call) => this.callTool(call),
      (error) => this.refuse(error),
    );
    this.controls.enable(false);
    this.restart = button("Another episode", () => this.again());
    const mode = drawingMode(env);
    this.draws = h("input", { type: "checkbox", onchange: () => this.redraw() });
    // Some environments draw only what they were made to draw, and break at anything else. One whose drawing a client
    // can choose is not of that kind.
    this.draws.checked = mode === "rgb_array" && "render_mode" in (env.kwargs_schema.properties ?? {});
    this.drawMode = mode;
    fill(
      this.stage,
      this.instruction,
      h("div", { class: "board" }, this.frame, this.observation),
      this.facts,
      this.controls.element,
      h(
        "div",
        { class: "row" },
        this.restart,
        button("Download the episode", () => this.save()),
        button("Step through it", () => this.replay()),
        mode && h("label", { class: "check" }, this.draws, "Draw each step"),
      ),
      h("details", {}, h("summary", {}, "Info"), this.info),
      historyTable(this.history),
    );
    this.stage.hidden = false;
  }

  async again() {
    this.problem.clear();
    const begin = (session) => {
      fill(this.history);
      const labels = this.labels();
      return session.reset(Object.keys(labels).length ? { options: labels } : {});
    };
    await this.run(begin, () => this.begun());
  }

  async act(action) {
    this.problem.clear();
    const step = (session) => {
      if (session.over) return null;
      this.lastAction = action;
      return session.step(action);
    };
    await this.run(step);
  }

  /** Take a step with a call, which the server writes as the environment reads it. */
  async callTool(call) {
    this.problem.clear();
    const step = async (session) => {
      if (session.over) return null;
      const { text } = await this.app.server.json("console/written_call", "POST", call);
      this.lastAction = text;
      return session.step(text);
    };
    await this.run(step);
  }

  /**
   * Ask the server and show what it answers, when it is the turn: an environment does one thing at a time.
   * @param {(session: Session) => Promise<object> | null} ask
   * @param {() => void} [shown]
   */
  run(ask, shown = () => {}) {
    const { session } = this;
    this.turns = this.turns.then(async () => {
      if (session !== this.session) return;
      try {
        const reply = await ask(session);
        if (reply === null || session !== this.session) return;
        this.took(reply);
        shown();
      } catch (error) {
        this.refuse(error);
      }
      await this.draw();
    });
    return this.turns;
  }

  took(reply) {
    const { over } = this.session;
    fill(this.observation, showValue(reply.observation, this.spaces.observation));
    fill(this.facts, tiles(this.session, reply));
    this.info.textContent = pretty(reply.info);
    const begun = reply.reward === undefined;
    this.controls.offer(reply.info);
    if (begun) {
      this.instruct(reply.info);
      this.controls.begin(reply.observation);
    }
    this.history.prepend(
      begun ? resetRow(this.session) : stepRow(this.session, reply, this.lastAction, this.spaces),
    );
    const leaves = over && this.controls.element.contains(document.activeElement);
    this.controls.enable(!over);
    // A control that is disabled loses the focus to nowhere.
    if (leaves) this.restart.focus();
    announce(begun ? `Episode begun with seed ${this.session.seed}` : spoken(this.session, reply));
  }

  /** What the policy is told; where there are forms for its tools, without the tools and how they are called. */
  instruct(info) {
    const { instruction, rules } = info;
    const text = this.controls.tools?.offered && typeof rules === "string" ? rules : instruction;
    if (typeof text === "string") fill(this.instruction, text);
  }

  redraw() {
    this.turns = this.turns.then(() => this.draw());
  }

  async draw() {
    const { session } = this;
    if (session === null || !this.draws.checked) {
      fill(this.frame);
      return;
    }
    try {
      const { frame } = await session.render(this.drawMode);
      if (session !== this.session) return;
      fill(this.frame, showValue(frame, null));
    } catch (error) {
      this.draws.checked = false;
      fill(this.frame);
      this.refuse(error);
      if (error.code !== "env_error") return;
      // Its episode broke off with the drawing.
      this.session.over = true;
      this.controls.enable(false);
    }
  }

  async save() {
    try {
      const episode = await this.session.episode();
      download(fileName(episode), `${JSON.stringify(episode, null, 2)}\n`);
    } catch (error) {
      this.refuse(error);
    }
  }

  async replay() {
    try {
      this.app.episode = await this.session.episode();
      this.app.go("#/replay");
    } catch (error) {
      this.refuse(error);
    }
  }

  refuse(error) {
    this.problem.show(error);
    error.control?.closest("details")?.setAttribute("open", "");
    error.control?.focus();
  }

  stop() {
    this.stopped = true;
    this.close().catch(() => {
      // The server drops sessions of a socket that is gone by itself.
    });
  }

  async close() {
    const { session } = this;
    this.session = null;
    if (session !== null) await session.close();
  }
}

/** One environment on the server. */
class Session {
  constructor(server, made) {
    this.server = server;
    this.id = made.session_id;
    this.over = true;
  }

  async reset(fields) {
    const reply = await this.server.call("reset", { session_id: this.id, ...fields });
    Object.assign(this, { episodeIndex: reply.episode, steps: 0, total: 0, seed: reply.seed, over: false });
    return reply;
  }

  async step(action) {
    const place = { episode: this.episodeIndex, step: this.steps };
    const reply = await this.server.call("step", { session_id: this.id, action, ...place });
    this.steps = reply.step;
    this.total += Number(reply.reward);
    this.over = reply.terminated || reply.truncated;
    return reply;
  }

  render(mode) {
    return this.server.call("render", { session_id: this.id, mode });
  }

  episode() {
    return this.server.call("episode", { session_id: this.id });
  }

  close() {
    return this.server.call("close", { session_id: this.id });
  }
}

/** What replies are made of: what the environment declares, and the marks of the profile that it is made with. */
async function mannerOf(server, env, kwargs) {
  const profile = kwargs.profile ?? env.kwargs_schema.properties?.profile?.default;
  if (typeof profile !== "string") return { ...env.metadata.reply };
  const { before, after } = await server.json("console/action_marks", "POST", { profile });
  return { ...env.metadata.reply, mark: (action) => `${before}${action}${after}` };
}

/** The mode in which a page can show an environment, pictures first. */
function drawingMode(env) {
  const modes = env.metadata.render_modes ?? [];
  return ["rgb_array", "ansi"].find((mode) => modes.includes(mode)) ?? null;
}

function historyTable(body) {
  const head = ["step", "action", "reward", "observation"].map((name) => h("th", { scope: "col" }, name));
  const table = h(
    "table",
    { class: "history" },
    h("caption", {}, "Steps, the last one first"),
    h("thead", {}, h("tr", {}, head)),
    body,
  );
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Steps" }, table);
}

function resetRow(session) {
  return h("tr", {}, h("th", { scope: "row" }, "reset"), h("td", { colspan: "3" }, `seed ${session.seed}`));
}

function stepRow(session, reply, action, spaces) {
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, reply.step - 1),
    h("td", { class: "cut" }, h("div", {}, describeAction(action, spaces.action))),
    h("td", { class: "number" }, shortNumber(Number(reply.reward))),
    h("td", { class: "cut" }, h("div", {}, inLine(reply.observation, spaces.observation))),
  );
}

function tiles(session, reply) {
  const rows = [
    ["Seed", session.seed],
    ["Steps", session.steps],
    ["Last reward", reply.reward === undefined ? "–" : shortNumber(Number(reply.reward))],
    ["Return", shortNumber(session.total)],
    ["State", stateOf(reply)],
  ];
  return rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
}

function stateOf(reply) {
  if (!reply.terminated && !reply.truncated)
    return reply.info.action_is_valid === false ? "reply not understood" : "in play";
  const end = reply.terminated ? "terminated" : "truncated";
  if (typeof reply.info.success !== "boolean") return end;
  return `${end}, ${reply.info.success ? "success" : "no success"}`;
}

function spoken(session, reply) {
  const observation = typeof reply.observation === "string" ? `. ${reply.observation}` : "";
  return `Step ${reply.step - 1}: reward ${shortNumber(Number(reply.reward))}, ${stateOf(reply)}${observation}`;
}
