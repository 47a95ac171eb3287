// Stepping through a portable episode, while the server proves that it happens again.

import { describeAction } from "./actions.js";
import { alertBox, announce, button, fill, h, labelled } from "./dom.js";
import { firstSteps, readEpisode } from "./episode.js";
import { RunView } from "./run.js";
import { isRunFile } from "./run_file.js";
import { shortNumber, showValue, pretty } from "./values.js";

// The digests that the server makes are asked for after so many steps, and then each time there are half as many more.
const FIRST_PROOF = 25;
const GROWTH = 1.5;

export class ReplayView {
  constructor(app) {
    this.app = app;
    this.title = "Replay";
    this.problem = alertBox();
    this.run = 0;
    this.file = h("input", {
      type: "file",
      accept: ".json,.jsonl,application/json",
      onclick: () => this.forget(),
      onchange: () => this.open(),
    });
    this.verdict = h("p", { class: "verdict", role: "status" });
    this.progress = h("progress", { "aria-label": "Replayed steps", hidden: true });
    this.player = h("section", { "aria-label": "Episode", hidden: true });
    this.ofRun = new RunView(app, (error) => (error ? this.problem.show(error) : this.problem.clear()));
    this.element = h(
      "section",
      {},
      h("h1", { tabindex: "-1" }, "Replay"),
      h(
        "p",
        {},
        "A portable episode holds a seed, actions and a digest of every step. ",
        "The server takes the same steps again, and each digest has to be the same. ",
        "A run’s episodes.jsonl opens here as well: what its policy saw and said, turn by turn.",
      ),
      h(
        "div",
        { class: "card" },
        labelled(
          "Episode file",
          this.file,
          "From “Download the episode”, roll-env play --save, or GET /v1/sessions/…/episode; or a run’s episodes.jsonl.",
        ),
      ),
      this.problem.element,
      this.verdict,
      this.progress,
      this.player,
      this.ofRun.element,
    );
  }

  async start() {
    const { episode } = this.app;
    this.app.episode = null;
    if (episode) await this.replay(() => readEpisode(JSON.stringify(episode)));
  }

  stop() {
    this.run += 1;
    this.ofRun.close();
  }

  /** Let the same file be chosen again: it may have been written anew. */
  forget() {
    this.file.value = "";
  }

  async open() {
    const [file] = this.file.files;
    if (file === undefined) return;
    if (await isRunFile(file)) {
      this.clear();
      await this.ofRun.open(file);
      return;
    }
    const text = await file.text();
    await this.replay(() => readEpisode(text));
  }

  /** Replay an episode from its begin; another replay, or leaving the page, ends it. */
  async replay(read) {
    this.clear();
    const mine = this.run;
    const replay = new Replay(this.app.server, (session) => this.app.closeLater(session));
    try {
      const episode = read();
      await replay.begin(episode);
      if (mine !== this.run) return;
      this.show(replay);
      this.say("", `Replaying ${stepsOf(episode)} …`);
      while (mine === this.run && (await replay.advance())) this.grow(replay);
      if (mine !== this.run) return;
      this.grow(replay);
      this.judge(replay);
    } catch (error) {
      if (mine !== this.run) return;
      this.say("bad", "Not proved: the replay did not get to its end.");
      this.problem.show(error);
    } finally {
      this.progress.hidden = true;
      await replay.close();
    }
  }

  /** Leave what was shown before. */
  clear() {
    this.run += 1;
    this.problem.clear();
    this.say("", "");
    this.player.hidden = true;
    this.progress.hidden = true;
    this.ofRun.close();
  }

  judge(replay) {
    const bad = replay.frames.findIndex((frame) => frame.digest !== frame.recorded);
    const notes = replay.notes.map((note) => ` Note: ${note}.`).join("");
    if (bad < 0) {
      this.say("good", `Same: every digest of ${stepsOf(replay.episode)} is what was recorded.${notes}`);
      return;
    }
    const { digest, recorded } = replay.frames[bad];
    this.say(
      "bad",
      `Differs at ${placeOf(bad)}: its digest is ${digest}, and ${recorded} was recorded.${notes}`,
    );
    this.seek(bad);
  }

  say(kind, text) {
    this.verdict.className = `verdict ${kind}`;
    this.verdict.textContent = text;
  }

  /** Lay out the player. */
  show(replay) {
    const { episode } = replay;
    this.replayed = replay;
    this.at = 0;
    this.slider = h("input", {
      type: "range",
      min: "0",
      max: "0",
      value: "0",
      step: "1",
      oninput: () => this.seek(Number(this.slider.value)),
    });
    this.place = h("p", { class: "place" });
    this.frame = h("div", { class: "board" });
    this.steps = h("tbody");
    const move = (label, to) => button(label, () => this.seek(to()));
    this.back = [move("First", () => 0), move("Back", () => this.at - 1)];
    this.forth = [move("Forward", () => this.at + 1), move("Last", () => replay.frames.length - 1)];
    fill(
      this.player,
      h(
        "dl",
        { class: "facts" },
        factsOf(episode).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
      ),
      h("div", { class: "row" }, this.back, this.forth),
      labelled("Step", this.slider),
      this.place,
      this.frame,
      stepsTable(this.steps),
    );
    this.player.hidden = false;
    this.progress.max = Math.max(1, episode.actions.length);
    this.progress.hidden = false;
    this.shown = 0;
    this.marked = 0;
    this.grow(replay);
    this.seek(0);
  }

  /** Show the steps that have been replayed since. */
  grow(replay) {
    const { frames } = replay;
    // A difference takes back what came after it.
    while (this.shown > frames.length) this.steps.children[--this.shown].remove();
    for (; this.shown < frames.length; this.shown += 1) this.steps.append(this.rowOf(replay, this.shown));
    for (; frames[this.marked]?.digest !== undefined; this.marked += 1)
      markRow(this.steps.children[this.marked], frames[this.marked]);
    this.progress.value = frames.length - 1;
    this.slider.max = frames.length - 1;
    this.enable();
  }

  rowOf(replay, index) {
    const frame = replay.frames[index];
    const jump = button(placeOf(index), () => this.seek(index), { class: "link" });
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, jump),
      h(
        "td",
        { class: "cut" },
        h("div", {}, index === 0 ? "–" : describeAction(frame.action, replay.spaces.action)),
      ),
      h("td", { class: "number" }, index === 0 ? "–" : shortNumber(Number(frame.reward))),
      h(
        "td",
        {},
        [frame.terminated && "terminated", frame.truncated && "truncated"].filter(Boolean).join(", "),
      ),
      h("td", { class: "digest" }, frame.recorded),
    );
  }

  seek(index) {
    const { frames, spaces } = this.replayed;
    this.at = Math.min(Math.max(index, 0), frames.length - 1);
    const frame = frames[this.at];
    this.slider.value = this.at;
    const action =
      this.at === 0
        ? `seed ${this.replayed.episode.seed}`
        : `action ${describeAction(frame.action, spaces.action)}, reward ${shortNumber(Number(frame.reward))}`;
    this.place.textContent = `${placeOf(this.at)}: ${action}`;
    fill(
      this.frame,
      h(
        "div",
        { class: "observation", role: "region", "aria-label": "Observation" },
        showValue(frame.observation, spaces.observation),
      ),
    );
    for (const row of this.steps.children) row.removeAttribute("aria-current");
    this.steps.children[this.at]?.setAttribute("aria-current", "step");
    this.enable();
    announce(this.place.textContent);
  }

  enable() {
    // Not `disabled`: the button that was just pressed keeps the focus.
    for (const each of this.back) each.setAttribute("aria-disabled", String(this.at === 0));
    for (const each of this.forth)
      each.setAttribute("aria-disabled", String(this.at === this.replayed.frames.length - 1));
  }
}

/** An episode that is played again on the server, frame by frame. */
class Replay {
  constructor(server, closeLater) {
    this.server = server;
    this.closeLater = closeLater;
    this.session = null;
    this.frames = [];
    this.notes = [];
    this.nextProof = FIRST_PROOF;
  }

  async begin(episode) {
    this.episode = episode;
    const env = await this.server.call("envs", { env_id: episode.env_id });
    if (env.version !== episode.env_version) {
      this.notes.push(
        `it was recorded with version ${episode.env_version} and played with version ${env.version}`,
      );
    }
    if (!env.deterministic)
      this.notes.push("this environment does not declare that seed and actions decide what happens");
    const made = await this.server.call("make", { env_id: episode.env_id, kwargs: episode.kwargs });
    this.session = made.session_id;
    this.spaces = { action: made.action_space, observation: made.observation_space };
    const options = episode.options === null ? {} : { options: episode.options };
    const first = await this.server.call("reset", {
      session_id: this.session,
      seed: episode.seed,
      ...options,
    });
    this.index = first.episode;
    this.frames.push({ observation: first.observation, recorded: episode.reset_digest });
    await this.prove();
  }

  /** Take one step; whether there may be another. */
  async advance() {
    const step = this.frames.length - 1;
    if (this.differs() || step >= this.episode.actions.length) return false;
    if (this.episode.reseeds.some(([at]) => at === step)) {
      await this.restoreAt(step);
      if (this.differs()) return false;
    }
    const action = this.episode.actions[step];
    const reply = await this.server.call("step", {
      session_id: this.session,
      action,
      episode: this.index,
      step,
    });
    const { observation, reward, terminated, truncated } = reply;
    this.frames.push({
      action,
      observation,
      reward,
      terminated,
      truncated,
      recorded: this.episode.digests[step],
    });
    const last = step + 1 === this.episode.actions.length;
    if (last || terminated || truncated || step + 1 >= this.nextProof) await this.prove();
    return true;
  }

  /** Have the server say which digests it has made, and compare. */
  async prove() {
    const { reset_digest: first, digests } = await this.server.call("episode", { session_id: this.session });
    [first, ...digests].forEach((digest, index) => {
      this.frames[index].digest = digest;
    });
    const bad = this.frames.findIndex((frame) => frame.digest !== frame.recorded);
    // What came after a difference is of another episode.
    if (bad >= 0) this.frames.length = bad + 1;
    this.nextProof = Math.max(FIRST_PROOF, Math.ceil(GROWTH * digests.length));
  }

  differs() {
    const last = this.frames.at(-1);
    return last.digest !== undefined && last.digest !== last.recorded;
  }

  /** Go on in a session that was seeded anew here, as a fork is; no call does that to a session in the middle. */
  async restoreAt(step) {
    await this.prove();
    if (this.differs()) return;
    const made = await this.server.call("restore", { episode: firstSteps(this.episode, step) });
    await this.close();
    this.session = made.session_id;
    this.index = this.episode.episode ?? 0;
  }

  async close() {
    if (this.session !== null) this.closeLater(this.session);
    this.session = null;
  }
}

function stepsOf(episode) {
  const count = episode.actions.length;
  return count === 1 ? "1 step" : `${count} steps`;
}

function placeOf(index) {
  return index === 0 ? "the reset" : `step ${index - 1}`;
}

function factsOf(episode) {
  return [
    ["Environment", `${episode.env_id}, version ${episode.env_version}`],
    ["Seed", episode.seed],
    ["Steps", episode.actions.length],
    ["Kwargs", Object.keys(episode.kwargs).length ? pretty(episode.kwargs) : "none"],
  ];
}

function stepsTable(body) {
  const head = ["place", "action", "reward", "end", "recorded digest"].map((name) =>
    h("th", { scope: "col" }, name),
  );
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "All steps" },
    h("table", { class: "history" }, h("caption", {}, "All steps"), h("thead", {}, h("tr", {}, head)), body),
  );
}

function markRow(row, frame) {
  const same = frame.digest === frame.recorded;
  row.lastElementChild.append(same ? " ✓ same" : ` ✗ now ${frame.digest}`);
}
