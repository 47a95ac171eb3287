// Controls for actions: buttons with keys where there are few, text or JSON otherwise.

import { button, fill, h, labelled } from "./dom.js";
import { FormError, parseJson } from "./kwargs.js";
import { describeSpace, exampleOf, isText } from "./spaces.js";
import { inLine } from "./values.js";

const MOST_BUTTONS = 32;
const ARROWS = { ArrowLeft: "left", ArrowRight: "right", ArrowUp: "up", ArrowDown: "down" };
const ARROW_SIGNS = { left: "←", right: "→", up: "↑", down: "↓" };

/**
 * The controls of an action space.
 * @param {object} space
 * @param {(action: unknown) => void} act
 * @param {(error: Error) => void} refuse
 */
export class ActionControls {
  constructor(space, act, refuse) {
    this.space = space;
    this.act = act;
    this.refuse = refuse;
    this.choices = [];
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
      this.form,
    );
    this.offer({});
  }

  /** Offer what the info says can be done now. */
  offer(info) {
    const choices = this.choicesOf(info);
    if (JSON.stringify(choices) === JSON.stringify(this.choices)) return;
    const focused = this.buttons.contains(document.activeElement);
    this.choices = choices;
    fill(
      this.buttons,
      choices.map((choice, index) => this.choiceButton(choice, index)),
    );
    fill(this.keys, choices.length > 0 && `Keys, while a button has the focus: ${this.keyNames()}.`);
    if (focused) this.focus();
  }

  focus() {
    (this.buttons.querySelector("button") ?? this.input)?.focus();
  }

  /** Controls of an episode that is over, or of one that waits for an answer. */
  enable(enabled) {
    this.element.disabled = !enabled;
  }

  choicesOf(info) {
    const available = info.available_actions;
    if (Array.isArray(available) && available.length <= MOST_BUTTONS && available.every(isPlain))
      return available;
    if (this.space.type !== "Discrete" || this.space.n > MOST_BUTTONS) return [];
    return Array.from({ length: this.space.n }, (_, index) => this.space.start + index);
  }

  choiceButton(choice, index) {
    const name = String(choice);
    const sign = ARROW_SIGNS[name.toLowerCase()] ?? this.digitOf(choice, index);
    return button(name, () => this.act(choice), sign ? { "aria-keyshortcuts": sign, "data-key": sign } : {});
  }

  /** The digit that stands for a choice: a number's own, or its place. */
  digitOf(choice, index) {
    if (typeof choice === "number") return choice >= 0 && choice <= 9 ? String(choice) : "";
    return index < 9 ? String(index + 1) : "";
  }

  keyNames() {
    const keys = this.choices.map(
      (choice, index) => ARROW_SIGNS[String(choice).toLowerCase()] ?? this.digitOf(choice, index),
    );
    return keys.filter(Boolean).join(" ");
  }

  key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const index = this.choices.findIndex((choice, at) =>
      event.key in ARROWS
        ? String(choice).toLowerCase() === ARROWS[event.key]
        : this.digitOf(choice, at) === event.key,
    );
    if (index < 0) return;
    event.preventDefault();
    this.buttons.children[index].focus();
    // A key that is held down does not play on by itself.
    if (!event.repeat) this.act(this.choices[index]);
  }

  textForm() {
    this.input = h("textarea", {
      rows: "2",
      spellcheck: "false",
      onkeydown: (event) => {
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        this.submit();
      },
    });
    return this.formOf(labelled("Reply", this.input, "Enter sends it, Shift+Enter begins a line."));
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

  submit() {
    try {
      const action = isText(this.space)
        ? this.input.value
        : parseJson("action", this.input.value, this.input);
      if (isText(this.space)) this.input.value = "";
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
