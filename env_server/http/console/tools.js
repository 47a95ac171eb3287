// A form for each tool that an environment declares, and calls written as its policy would write them.

import { fill, h, labelled } from "./dom.js";
import { FormError, kwargsFields } from "./kwargs.js";

const callOf = (name, values) => ({ name, arguments: values });
const WRITERS = {
  hermes: (name, values) => `<tool_call>\n${JSON.stringify(callOf(name, values))}\n</tool_call>`,
  "qwen-xml": (name, values) =>
    `<tool_call>\n<function=${name}>\n${Object.entries(values)
      .map(([key, value]) => `<parameter=${key}>\n${plainText(value)}\n</parameter>\n`)
      .join("")}</function>\n</tool_call>`,
  openai: (name, values) =>
    JSON.stringify({
      tool_calls: [{ id: "call_0", type: "function", function: { name, arguments: JSON.stringify(values) } }],
    }),
  llama: (name, values) => `<|python_tag|>${JSON.stringify({ name, parameters: values })}`,
  mistral: (name, values) => `[TOOL_CALLS]${JSON.stringify([callOf(name, values)])}`,
};

/** Whether calls can be written in a format. */
export function writesCalls(format) {
  return format in WRITERS;
}

export class ToolForm {
  /**
   * @param {string} format one that `writesCalls`
   * @param {(reply: string) => void} say
   * @param {(error: Error) => void} refuse
   */
  constructor(format, say, refuse) {
    this.write = WRITERS[format];
    this.say = say;
    this.refuse = refuse;
    this.declared = "";
    this.select = h("select", { onchange: () => this.show() });
    this.about = h("p", { class: "hint" });
    this.fields = h("div", {});
    this.element = h(
      "form",
      { class: "tool", hidden: true, novalidate: true, onsubmit: (event) => this.submit(event) },
      labelled("Tool", this.select),
      this.about,
      this.fields,
      h("button", { type: "submit" }, "Call"),
    );
  }

  /** Offer what the info declares; an info without a declaration changes nothing. */
  offer(tools) {
    if (!Array.isArray(tools) || JSON.stringify(tools) === this.declared) return;
    this.declared = JSON.stringify(tools);
    const functions = tools.map((tool) => tool?.function ?? tool).filter((each) => typeof each?.name === "string");
    this.tools = new Map(functions.map((each) => [each.name, each]));
    fill(
      this.select,
      functions.map(({ name }) => h("option", {}, name)),
    );
    this.element.hidden = functions.length === 0;
    if (functions.length) this.show();
  }

  /** Whether there is a tool to call. */
  get offered() {
    return !this.element.hidden;
  }

  /** The fields of the tool that is chosen. */
  show() {
    const tool = this.tools.get(this.select.value);
    this.form = kwargsFields(tool.parameters ?? {});
    fill(this.about, tool.description ?? "");
    fill(this.fields, this.form.elements);
  }

  submit(event) {
    event.preventDefault();
    try {
      this.say(this.write(this.select.value, this.form.read()));
    } catch (error) {
      if (!(error instanceof FormError)) throw error;
      this.refuse(error);
    }
  }
}

function plainText(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}
