// A form for each tool that an environment declares. The server writes the calls, as its environment reads them.

import { fill, h, labelled } from "./dom.js";
import { FormError, kwargsFields } from "./kwargs.js";

export class ToolForm {
  /**
   * @param {(call: object) => void} call
   * @param {(error: Error) => void} refuse
   */
  constructor(call, refuse) {
    this.call = call;
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
  offer({ tools, call_format }) {
    if (!Array.isArray(tools) || JSON.stringify([tools, call_format]) === this.declared) return;
    this.declared = JSON.stringify([tools, call_format]);
    this.format = call_format;
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
    this.form = kwargsFields(parametersOf(tool));
    fill(this.about, tool.description ?? "");
    fill(this.fields, this.form.elements);
  }

  submit(event) {
    event.preventDefault();
    const tool = this.tools.get(this.select.value);
    const meant = { call_format: this.format, name: tool.name, parameters: parametersOf(tool) };
    try {
      this.call({ ...meant, arguments: this.form.read() });
    } catch (error) {
      if (!(error instanceof FormError)) throw error;
      this.refuse(error);
    }
  }
}

/** The schema of a tool's parameters; one that allows anything where its environment declares none. */
function parametersOf({ parameters }) {
  const isSchema = typeof parameters === "object" && parameters !== null && !Array.isArray(parameters);
  return isSchema ? parameters : {};
}
