// The episodes of a run on the page: a list, and one of them turn by turn, played again by the server if a reader wants.

import { announce, button, fill, h, labelled } from "./dom.js";
import { readEntry, readRun } from "./run_file.js";
import { inLine, pretty, shortNumber, showValue } from "./values.js";

const SHOWN_AT_ONCE = 100;
const NEAR = 1e-9;

export class RunView {
  /**
   * @param {object} app
   * @param {(error: Error | null) => void} tell shows a problem, or none
   */
  constructor(app, tell) {
    this.app = app;
    this.tell = tell;
    this.reading = 0;
    this.progress = h("progress", { "aria-label": "Read of the file", hidden: true });
    this.note = h("p", { class: "hint", role: "status" });
    this.outcome = h("select", { onchange: () => this.list() });
    this.rows = h("tbody");
    this.more = button("Show more", () => this.grow());
    this.player = h("section", { "aria-label": "Episode of the run", hidden: true });
    this.table = h(
      "div",
      { hidden: true },
      h("div", { class: "bar" }, labelled("Outcome", this.outcome)),
      h(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": "Episodes of the run" },
        listTable(this.rows),
      ),
      this.more,
    );
    this.element = h("section", { hidden: true }, this.progress, this.note, this.table, this.player);
  }

  /** Read a file and list its episodes. */
  async open(file) {
    this.close();
    this.reading += 1;
    const mine = this.reading;
    this.file = file;
    this.element.hidden = false;
    this.progress.max = Math.max(1, file.size);
    this.progress.hidden = false;
    const { entries, bad, torn } = await readRun(file, (bytes) => {
      this.progress.value = bytes;
      return mine === this.reading;
    });
    if (mine !== this.reading) return;
    this.progress.hidden = true;
    this.entries = entries;
    this.note.textContent = noteOf(entries, bad, torn);
    const outcomes = [...new Set(entries.map((entry) => entry.outcome))].sort();
    fill(
      this.outcome,
      h("option", { value: "" }, "all"),
      outcomes.map((outcome) => h("option", {}, outcome)),
    );
    this.table.hidden = false;
    this.list();
  }

  close() {
    this.reading += 1;
    this.element.hidden = true;
    this.table.hidden = true;
    this.player.hidden = true;
    this.note.textContent = "";
  }

  list() {
    const { value } = this.outcome;
    this.found = this.entries.filter((entry) => !value || entry.outcome === value);
    this.shown = 0;
    fill(this.rows);
    this.grow();
  }

  grow() {
    const next = this.found.slice(this.shown, this.shown + SHOWN_AT_ONCE);
    this.rows.append(...next.map((entry) => this.rowOf(entry)));
    this.shown += next.length;
    this.more.hidden = this.shown >= this.found.length;
  }

  rowOf(entry) {
    const cells = [entry.step ?? "–", entry.envId, entry.seed, entry.member, entry.outcome];
    const open = button(`line ${entry.number}`, () => this.show(entry), { class: "link" });
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, open),
      cells.map((cell) => h("td", {}, String(cell))),
      h("td", { class: "number" }, shortNumber(Number(entry.reward))),
      h("td", { class: "number" }, entry.turns),
    );
  }

  async show(entry) {
    this.tell(null);
    try {
      const episode = await readEntry(this.file, entry);
      fill(this.player, new RunEpisode(this.app.server, episode, entry, this.tell).element);
      this.player.hidden = false;
      this.player.scrollIntoView();
    } catch (error) {
      this.tell(error);
    }
  }
}

/** One episode, turn by turn. */
class RunEpisode {
  constructor(server, episode, entry, tell) {
    Object.assign(this, { server, episode, tell, at: 0 });
    this.place = h("p", { class: "place" });
    this.turn = h("div", {});
    this.verdict = h("p", { class: "verdict", role: "status" });
    const last = episode.turns.length - 1;
    this.slider = h("input", {
      type: "range",
      min: "0",
      max: Math.max(0, last),
      value: "0",
      step: "1",
      oninput: () => this.seek(Number(this.slider.value)),
    });
    const move = (label, to) => button(label, () => this.seek(to()));
    this.back = [move("First", () => 0), move("Back", () => this.at - 1)];
    this.forth = [move("Forward", () => this.at + 1), move("Last", () => last)];
    this.again = button("Play it again on this server", () => this.compare());
    this.element = h(
      "div",
      { class: "card" },
      h("h2", {}, `Line ${entry.number}`),
      h(
        "dl",
        { class: "facts" },
        factsOf(episode).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
      ),
      h("div", { class: "row" }, this.back, this.forth, this.again),
      labelled("Turn", this.slider),
      this.verdict,
      this.place,
      this.turn,
    );
    this.seek(0);
  }

  seek(index) {
    const { turns } = this.episode;
    this.at = Math.min(Math.max(index, 0), turns.length - 1);
    this.slider.value = this.at;
    for (const each of this.back) each.setAttribute("aria-disabled", String(this.at <= 0));
    for (const each of this.forth) each.setAttribute("aria-disabled", String(this.at >= turns.length - 1));
    if (turns.length === 0) {
      this.place.textContent = "The policy said nothing.";
      return;
    }
    const turn = turns[this.at];
    const valid = turn.valid === false ? ", not understood" : "";
    const made = turn.is_summary ? "a summary of the history" : `reward ${shortNumber(Number(turn.reward))}${valid}`;
    this.place.textContent = `turn ${this.at}: ${made}`;
    fill(this.turn, said("Observation", turn.observation), said("Reply", turn.reply));
    announce(this.place.textContent);
  }

  /** Have the server play the same replies, and compare what it shows and pays. */
  async compare() {
    this.tell(null);
    this.again.disabled = true;
    this.say("", "Playing …");
    try {
      const difference = await differenceOf(this.server, this.episode);
      if (difference === null) this.say("good", `Same: ${turnsOf(this.episode)}, observations and rewards.`);
      else {
        this.say("bad", `Differs at turn ${difference.turn}: ${difference.text}`);
        this.seek(difference.turn);
      }
    } catch (error) {
      this.say("bad", "Not compared: the replay did not get to its end.");
      this.tell(error);
    } finally {
      this.again.disabled = false;
    }
  }

  say(kind, text) {
    this.verdict.className = `verdict ${kind}`;
    this.verdict.textContent = text;
  }
}

/** The first turn at which the server shows or pays something else than was recorded; null where there is none. */
async function differenceOf(server, { task, turns }) {
  const made = await server.call("make", { env_id: task.env_id, kwargs: task.kwargs ?? {} });
  const session = { session_id: made.session_id };
  const shown = (observation) => inLine(observation, made.observation_space);
  try {
    const options = task.options ? { options: task.options } : {};
    const first = await server.call("reset", { ...session, seed: task.seed, ...options });
    let seen = shown(first.observation);
    const last = turns.findLastIndex((turn) => !turn.is_summary);
    let taken = 0;
    for (const [turn, recorded] of turns.entries()) {
      // The environment never saw a summary.
      if (recorded.is_summary) continue;
      if (seen !== recorded.observation) return { turn, text: `the server shows ${cut(seen)}` };
      const place = { episode: first.episode, step: taken };
      const reply = await server.call("step", { ...session, action: recorded.reply, ...place });
      if (Math.abs(Number(reply.reward) - recorded.reward) > NEAR)
        return { turn, text: `the server pays ${reply.reward}, and ${recorded.reward} was recorded` };
      const over = reply.terminated || reply.truncated;
      taken += 1;
      if (over && turn < last) return { turn, text: "the server ends the episode here" };
      seen = shown(reply.observation);
    }
    return null;
  } finally {
    await server.call("close", session).catch(() => {
      // The server drops sessions of a socket that is gone by itself.
    });
  }
}

function cut(text) {
  return text.length > 200 ? `${text.slice(0, 200)} …` : text;
}

function said(name, text) {
  return h(
    "div",
    { class: "board" },
    h(
      "div",
      { class: "observation", role: "region", "aria-label": name, tabindex: "0" },
      h("strong", {}, name),
      showValue(typeof text === "string" ? text : pretty(text ?? null), null),
    ),
  );
}

function listTable(body) {
  const head = ["line", "step", "environment", "seed", "member", "outcome", "reward", "turns"].map((name) =>
    h("th", { scope: "col" }, name),
  );
  return h(
    "table",
    { class: "history" },
    h("caption", {}, "Episodes of the run"),
    h("thead", {}, h("tr", {}, head)),
    body,
  );
}

function noteOf(entries, bad, torn) {
  const notes = [`${entries.length} ${entries.length === 1 ? "episode" : "episodes"}.`];
  if (bad.length) notes.push(`Not episodes: line ${bad.slice(0, 10).join(", ")}${bad.length > 10 ? ", …" : ""}.`);
  if (torn) notes.push("The last line is not written to its end.");
  return notes.join(" ");
}

function turnsOf({ turns }) {
  const taken = turns.filter((turn) => !turn.is_summary).length;
  return taken === 1 ? "1 turn" : `${taken} turns`;
}

function factsOf({ task, member, outcome, detail, reward, turns, step }) {
  return [
    ["Environment", task.env_id],
    ["Seed", task.seed],
    ["Kwargs", Object.keys(task.kwargs ?? {}).length ? pretty(task.kwargs) : "none"],
    ...(step === undefined ? [] : [["Step of the run", step]]),
    ["Member of its group", member],
    ["Outcome", detail ? `${outcome}: ${detail}` : outcome],
    ["Reward", shortNumber(Number(reward))],
    ["Turns", turns.length],
  ];
}
