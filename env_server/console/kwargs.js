// A form for the kwargs of an environment, made from the JSON Schema that it declares.

import { h, labelled } from "./dom.js";

/** What a person has typed is not a value; the message says what is expected. */
export class FormError extends Error {
  constructor(message, control) {
    super(message);
    this.code = "invalid input";
    this.control = control;
  }
}

/** Fields for a schema: their elements, and a function that reads the kwargs. What is left empty is not sent. */
export function kwargsFields(schema) {
  const fields = Object.entries(schema.properties ?? {}).map(([name, part]) => fieldOf(name, part ?? {}));
  const open = schema.additionalProperties !== false && schema.additionalProperties !== undefined;
  if (open || (schema.properties === undefined && schema.additionalProperties !== false))
    fields.push(restField());
  return {
    elements: fields.map((field) => field.element),
    read: () => Object.assign({}, ...fields.map((field) => field.read())),
    count: fields.length,
  };
}

/** Say what a schema of one kwarg allows. */
export function describeKwarg(part) {
  const words = [];
  if (part.enum) words.push(part.enum.map((value) => JSON.stringify(value)).join(" | "));
  else if (part.type) words.push([part.type].flat().join(" or "));
  if (part.minimum !== undefined) words.push(`≥ ${part.minimum}`);
  if (part.exclusiveMinimum !== undefined) words.push(`> ${part.exclusiveMinimum}`);
  if (part.maximum !== undefined) words.push(`≤ ${part.maximum}`);
  if (part.exclusiveMaximum !== undefined) words.push(`< ${part.exclusiveMaximum}`);
  const { minItems: fewest, maxItems: most } = part;
  if (fewest !== undefined && fewest === most) words.push(`${most} items`);
  else {
    if (fewest !== undefined) words.push(`${fewest} items or more`);
    if (most !== undefined) words.push(`${most} items or fewer`);
  }
  if (part.default !== undefined) words.push(`default ${JSON.stringify(part.default)}`);
  return words.join(", ") || "any JSON";
}

function fieldOf(name, part) {
  const hint = part.description ? `${part.description} (${describeKwarg(part)})` : describeKwarg(part);
  const choices = part.enum ?? (part.type === "boolean" ? [true, false] : null);
  if (choices) return choiceField(name, choices, hint);
  if (part.type === "integer" || part.type === "number") return numberField(name, part, hint);
  if (part.type === "string") return textField(name, hint);
  return jsonField(name, hint);
}

function choiceField(name, choices, hint) {
  const select = h(
    "select",
    {},
    h("option", { value: "" }, "default"),
    choices.map((choice, index) => h("option", { value: String(index) }, JSON.stringify(choice))),
  );
  return field(name, select, hint, (text) => choices[Number(text)]);
}

function numberField(name, part, hint) {
  const input = h("input", {
    type: "number",
    min: part.minimum,
    max: part.maximum,
    step: part.type === "integer" ? "1" : "any",
    placeholder: "default",
  });
  const read = (text) => {
    if (!input.checkValidity()) throw new FormError(`${name}: ${input.validationMessage}`, input);
    return Number(text);
  };
  const made = field(name, input, hint, read);
  return {
    ...made,
    read: () => {
      // A number field is empty for a script while what stands in it is no number.
      if (input.validity.badInput) throw new FormError(`${name}: expected a number`, input);
      return made.read();
    },
  };
}

function textField(name, hint) {
  return field(
    name,
    h("input", { type: "text", placeholder: "default", autocomplete: "off" }),
    hint,
    (text) => text,
  );
}

function jsonField(name, hint) {
  const input = h("input", {
    type: "text",
    placeholder: "default",
    autocomplete: "off",
    spellcheck: "false",
  });
  return field(name, input, `JSON: ${hint}`, (text) => parseJson(name, text, input));
}

function restField() {
  const area = h("textarea", { rows: "2", spellcheck: "false" });
  const made = labelled("other kwargs", area, "JSON object");
  return { element: made, read: () => (area.value.trim() ? parseObject("other kwargs", area) : {}) };
}

function field(name, control, hint, parse) {
  return {
    element: labelled(name, control, hint),
    read: () => (control.value === "" ? {} : { [name]: parse(control.value) }),
  };
}

/** Read a JSON object from a control; null where it is empty. */
export function parseObject(name, control) {
  if (!control.value.trim()) return null;
  const value = parseJson(name, control.value, control);
  if (value === null || typeof value !== "object" || Array.isArray(value)) {
    throw new FormError(`${name}: expected a JSON object`, control);
  }
  return value;
}

/** Read JSON from a text that stands in a control. */
export function parseJson(name, text, control) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FormError(`${name}: expected JSON: ${error.message}`, control);
  }
}
