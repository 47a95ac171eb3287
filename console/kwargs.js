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
  const needed = new Set(Array.isArray(schema.required) ? schema.required : []);
  const fields = Object.entries(schema.properties ?? {}).map(([name, part]) =>
    fieldOf(name, part ?? {}, needed.has(name)),
  );
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
  if (Array.isArray(part.enum)) words.push(part.enum.map((value) => JSON.stringify(value)).join(" | "));
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

function fieldOf(name, part, needed) {
  // The default stands in the field.
  const allowed = describeKwarg({ ...part, default: undefined });
  const hint = part.description ? `${part.description} (${allowed})` : allowed;
  // Null is what a kwarg is that is left empty, or its default says otherwise and it is among the choices.
  const kinds = [part.type ?? []].flat().filter((kind) => kind !== "null");
  const kind = kinds.length === 1 ? kinds[0] : null;
  const empty = emptyOf(part, needed);
  const made = () => {
    if (Array.isArray(part.enum)) return choiceField(name, part.enum, hint, empty);
    if (kind === "boolean") return choiceField(name, [true, false], hint, empty);
    if (kind === "integer" || kind === "number") return numberField(name, kind, part, hint, empty);
    if (kind === "string") return textField(name, part, hint, empty);
    if (kind === "array" && Array.isArray(part.items?.enum)) return severalField(name, part.items.enum, hint);
    return jsonField(name, hint, empty);
  };
  const field = made();
  const read = () => {
    const found = field.read();
    if (needed && !(name in found)) throw new FormError(`${name}: is needed`, field.control);
    return found;
  };
  return { ...field, read };
}

/** What a field says that is left empty. */
function emptyOf(part, needed) {
  if (needed) return "needed";
  if (part.default === undefined) return "default";
  return part.default === null ? "default (null)" : `default (${JSON.stringify(part.default)})`;
}

/** A box for each value; none is checked: not sent. */
function severalField(name, values, hint) {
  const boxes = values.map((value) => [value, h("input", { type: "checkbox" })]);
  const group = h(
    "fieldset",
    { class: "several" },
    boxes.map(([value, box]) => h("label", {}, box, String(value))),
  );
  group.setAttribute("aria-label", name);
  const chosen = () => boxes.filter(([, box]) => box.checked).map(([value]) => value);
  return {
    element: h("div", { class: "field" }, h("span", { class: "label" }, name), group, h("small", {}, hint)),
    control: boxes[0]?.[1],
    read: () => (chosen().length ? { [name]: chosen() } : {}),
  };
}

function choiceField(name, choices, hint, empty) {
  const select = h(
    "select",
    {},
    h("option", { value: "" }, empty),
    choices.map((choice, index) => h("option", { value: String(index) }, JSON.stringify(choice))),
  );
  return field(name, select, hint, (text) => choices[Number(text)]);
}

function numberField(name, kind, part, hint, empty) {
  const input = h("input", {
    type: "number",
    min: part.minimum,
    max: part.maximum,
    step: kind === "integer" ? "1" : "any",
    placeholder: empty,
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

function textField(name, part, hint, empty) {
  const lines = part.format === "multiline";
  const control = lines
    ? h("textarea", { rows: "4", placeholder: empty, spellcheck: "false" })
    : h("input", { type: "text", placeholder: empty, autocomplete: "off" });
  return field(name, control, hint, (text) => text);
}

function jsonField(name, hint, empty) {
  const input = h("input", {
    type: "text",
    placeholder: empty,
    autocomplete: "off",
    spellcheck: "false",
  });
  return field(name, input, `JSON: ${hint}`, (text) => parseJson(name, text, input));
}

function restField() {
  const area = h("textarea", { rows: "2", spellcheck: "false" });
  const made = labelled("other kwargs", area, "JSON object");
  return { element: made, control: area, read: () => (area.value.trim() ? parseObject("other kwargs", area) : {}) };
}

function field(name, control, hint, parse) {
  return {
    element: labelled(name, control, hint),
    control,
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
