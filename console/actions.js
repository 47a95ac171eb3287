// Controls for actions: buttons with keys where there are few, forms for tools and programs, text or JSON otherwise.

import { button, fill, h, labelled } from "./dom.js";
import { FormError, parseJson } from "./kwargs.js";
import { describeSpace, exampleOf, isText } from "./spaces.js";
import { ToolForm } from "./tools.js";
import { inLine } from "./values.js";

const MOST_BUTTONS = 32;
const MOST_LABELLED = 200;
const WITH_ARGUMENT = /^(\w+)\[(.*)\]$/s;
const ARROWS = { ArrowLeft: "left", ArrowRight: "right", ArrowUp: "up", ArrowDown: "down" };
const ARROW_SIGNS = { left: "←", right: "→", up: "↑", down: "↓" };

/**
 * What replies are made of: a block of a language, an answer in tags; and what goes around an action that was chosen.
 * @typedef {{language?: string, answer?: boolean, mark?: (action: string) => string}} Manner
 */

/**
 * The controls of an action space.
 * @param {object} space
 * @param {Manner} manner
 * @param {(action: unknown) => void} act
 * @param {(call: object) => void} call
 * @param {(error: Error) => void} refuse
 */
export class ActionControls {
  constructor(space, manner, act, call, refuse) {
    this.space = space;
    this.manner = manner;
    this.act = act;
    this.refuse = refuse;
    this.choices = [];
    this.labels = null;
    this.tools = isText(space) ? new ToolForm(call, refuse) : null;
    this.buttons = h("div", {
      class: "choices",
      role: "group",
      "aria-label": "Actions",
      onkeydown: (event) => this.key(event),
    });
    this.form = null;
    if (isText(space)) this.form = this.textForm();
    else if (space.type !== "Discrete" || space.n > MOST_BUTTONS) this.form = this.jsonForm();
    this.keys = h("p", { class: "hint" });
    this.element = h(
      "fieldset",
      { class: "actions" },
      h("legend", {}, "Action"),
      this.buttons,
      this.keys,
      this.tools?.element,
      this.form,
      isText(space) && manner.answer && this.answerForm(),
    );
    this.offer({});
  }

  /** Offer what the info says can be done now. */
  offer(info) {
    this.tools?.offer(info);
    const labels = info.action_labels ?? null;
    const choices = this.choicesOf(info);
    if (JSON.stringify([choices, labels]) === JSON.stringify([this.choices, this.labels])) return;
    const focused = this.buttons.contains(document.activeElement);
    this.choices = choices;
    this.labels = labels;
    fill(
      this.buttons,
      choices.map((choice, index) => this.choiceControl(choice, index)),
    );
    const keys = this.keyNames();
    fill(this.keys, keys && `Keys, while a button has the focus: ${keys}.`);
    if (focused) this.focus();
  }

  focus(options) {
    (this.buttons.querySelector("input, button") ?? this.input)?.focus(options);
  }

  /** Begin a program with the last block of its language that the observation has. */
  begin(observation) {
    const { language } = this.manner;
    if (!language || typeof observation !== "string") return;
    const fence = `\`\`\`${language}\n`;
    const [from, to] = [observation.lastIndexOf(fence), observation.lastIndexOf("```")];
    if (from >= 0 && to > from) this.input.value = observation.slice(from + fence.length, to);
  }

  /** Controls of an episode that is over, or of one that waits for an answer. */
  enable(enabled) {
    this.element.disabled = !enabled;
  }

  choicesOf(info) {
    const available = info.available_actions;
    const most = info.action_labels ? MOST_LABELLED : MOST_BUTTONS;
    if (Array.isArray(available) && available.length <= most && available.every(isPlain)) return available;
    if (this.space.type !== "Discrete" || this.space.n > MOST_BUTTONS) return [];
    return Array.from({ length: this.space.n }, (_, index) => this.space.start + index);
  }

  /** A button; of labelled actions, one that has an argument and no label is a field for the argument. */
  choiceControl(choice, index) {
    const label = this.labels && Object.hasOwn(this.labels, choice) ? String(this.labels[choice]) : undefined;
    const argued = this.labels && label === undefined && WITH_ARGUMENT.exec(choice);
    if (argued) return this.argumentForm(argued[1], argued[2]);
    const name = String(choice);
    const sign = this.signOf(choice, index);
    return button(label ?? name, () => this.choose(choice), {
      ...(sign && { "aria-keyshortcuts": sign, "data-key": sign }),
      ...(label !== undefined && { title: name }),
    });
  }

  argumentForm(name, argument) {
    const input = h("input", { type: "text", autocomplete: "off", value: argument });
    const submitted = (event) => {
      event.preventDefault();
      this.choose(`${name}[${input.value}]`);
    };
    return h(
      "form",
      { class: "reply argument", onsubmit: submitted },
      labelled(name, input),
      h("button", { type: "submit" }, name),
    );
  }

  /** Take an action that was listed, said as replies are said here. */
  choose(choice) {
    this.act(typeof choice === "string" && this.manner.mark ? this.manner.mark(choice) : choice);
  }

  /** The key that stands for a choice, if one does. */
  signOf(choice, index) {
    return ARROW_SIGNS[String(choice).toLowerCase()] ?? this.digitOf(choice, index);
  }

  /** The digit that stands for a choice: a number's own, or its place. */
  digitOf(choice, index) {
    if (typeof choice === "number") return choice >= 0 && choice <= 9 ? String(choice) : "";
    return index < 9 ? String(index + 1) : "";
  }

  keyNames() {
    const buttons = [...this.buttons.children].filter((each) => each.tagName === "BUTTON");
    return buttons
      .map((each) => each.dataset.key)
      .filter(Boolean)
      .join(" ");
  }

  key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target.tagName === "INPUT") return;
    const index = this.choices.findIndex((choice, at) =>
      event.key in ARROWS
        ? String(choice).toLowerCase() === ARROWS[event.key]
        : this.digitOf(choice, at) === event.key,
    );
    if (index < 0) return;
    event.preventDefault();
    this.buttons.children[index].focus();
    // A key that is held down does not play on by itself.
    if (!event.repeat) this.choose(this.choices[index]);
  }

  textForm() {
    const { language } = this.manner;
    this.input = h("textarea", {
      rows: language ? "12" : "2",
      spellcheck: "false",
      onkeydown: (event) => {
        const sends = language ? event.ctrlKey || event.metaKey : !event.shiftKey;
        if (event.key !== "Enter" || !sends || event.isComposing) return;
        event.preventDefault();
        this.submit();
      },
    });
    const hint = language
      ? `Ctrl+Enter sends it, in a block of ${language} unless it has one.`
      : "Enter sends it, Shift+Enter begins a line.";
    return this.formOf(labelled(language ? `Reply in ${language}` : "Reply", this.input, hint));
  }

  /** A field for what stands in answer tags. */
  answerForm() {
    const input = h("input", { type: "text", autocomplete: "off" });
    const submitted = (event) => {
      event.preventDefault();
      this.act(`<answer>${input.value}</answer>`);
      input.value = "";
    };
    return h(
      "form",
      { class: "reply", onsubmit: submitted },
      labelled("Answer", input, "Ends the episode; it is put into answer tags."),
      h("button", { type: "submit" }, "Answer"),
    );
  }

  jsonForm() {
    this.input = h("input", {
      type: "text",
      autocomplete: "off",
      spellcheck: "false",
      value: JSON.stringify(exampleOf(this.space)),
    });
    return this.formOf(labelled("JSON", this.input, describeSpace(this.space)));
  }

  formOf(field) {
    const submitted = (event) => {
      event.preventDefault();
      this.submit();
    };
    return h(
      "form",
      { class: "reply", onsubmit: submitted },
      field,
      h("button", { type: "submit", class: "primary" }, "Send"),
    );
  }

  /** A reply as it is sent: a program in a block, unless it has one or is an answer. */
  written(text) {
    const { language } = this.manner;
    if (!language || text.includes("```") || text.includes("<answer>")) return text;
    return `\`\`\`${language}\n${text}\n\`\`\``;
  }

  submit() {
    try {
      const text = isText(this.space);
      const action = text
        ? this.written(this.input.value)
        : parseJson("action", this.input.value, this.input);
      // A program is mostly mended, not written anew.
      if (text && !this.manner.language) this.input.value = "";
      this.act(action);
    } catch (error) {
      if (!(error instanceof FormError)) throw error;
      this.refuse(error);
    }
  }
}

/** An action in a line of text. */
export function describeAction(action, space) {
  return action === "" ? "(empty text)" : inLine(action, space);
}

function isPlain(value) {
  return typeof value === "string" || typeof value === "number";
}
