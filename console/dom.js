// Elements are made of names and texts. Nothing here takes markup: what environments say stays text.

/**
 * Make an element.
 * @param {string} name
 * @param {Record<string, unknown>} [properties] attributes; `on...` are listeners; `undefined` or `false` leaves one out
 * @param {...(Node | string | number | null | undefined | false)} children
 */
export function h(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "value" || key === "htmlFor") element[key] = value;
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...present(children));
  return element;
}

/** Put other children into an element. */
export function fill(element, ...children) {
  element.replaceChildren(...present(children));
  return element;
}

function present(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : String(child)));
}

let lastId = 0;

/** An id that nothing else on the page has. */
export function freshId(prefix) {
  lastId += 1;
  return `${prefix}-${lastId}`;
}

/** A control under its label, with a hint if there is one. */
export function labelled(label, control, hint) {
  control.id ||= freshId("field");
  const hintId = hint ? `${control.id}-hint` : undefined;
  if (hintId) control.setAttribute("aria-describedby", hintId);
  return h(
    "div",
    { class: "field" },
    h("label", { htmlFor: control.id }, label),
    control,
    hint && h("small", { id: hintId }, hint),
  );
}

export function button(label, onclick, properties = {}) {
  return h("button", { type: "button", onclick, ...properties }, label);
}

/** Tell people who do not see the page what has happened. */
export function announce(text) {
  const announcer = document.getElementById("announcer");
  // The same text twice would not be read twice.
  announcer.textContent = announcer.textContent === text ? `${text}\u00a0` : text;
}

/** A box that shows a problem, and is read out. */
export function alertBox() {
  const box = h("div", { class: "alert", role: "alert", hidden: true });
  return {
    element: box,
    show(error) {
      const errors = error.problem?.errors ?? [];
      fill(
        box,
        h("strong", {}, error.code ?? "error"),
        " ",
        error.message,
        errors.length > 1 &&
          h(
            "ul",
            {},
            errors.map((each) => h("li", {}, `${each.field}: ${each.reason}`)),
          ),
      );
      box.hidden = false;
    },
    clear() {
      box.hidden = true;
      fill(box);
    },
  };
}

/** Hand a file to the reader. */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = h("a", { href: url, download: name });
  link.click();
  // The browser has to have begun reading it.
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
