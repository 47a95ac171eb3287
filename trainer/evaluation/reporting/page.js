"use strict";
const tip = document.getElementById("tip");

// The step under the pointer, and what every curve of the picture has there.
function describe(svg, event) {
  const chart = (svg.chart ??= JSON.parse(svg.dataset.chart));
  const box = svg.getBoundingClientRect();
  const scale = svg.viewBox.baseVal.width / box.width;
  const place = ((event.clientX - box.left) * scale - chart.left) / (chart.right - chart.left);
  const wanted = chart.first + Math.min(1, Math.max(0, place)) * (chart.last - chart.first);
  const rows = [];
  let step = wanted;
  for (const line of chart.lines) {
    let near = line.points[0];
    for (const point of line.points) if (Math.abs(point[0] - wanted) < Math.abs(near[0] - wanted)) near = point;
    if (line.points.length > 1 && step === wanted) step = near[0];
    rows.push([line, near[1]]);
  }
  const x = chart.left + ((step - chart.first) / (chart.last - chart.first || 1)) * (chart.right - chart.left);
  const pointer = svg.querySelector(".pointer");
  pointer.setAttribute("x1", x);
  pointer.setAttribute("x2", x);
  tip.replaceChildren(`step ${Math.round(step)}`);
  for (const [line, value] of rows) {
    const row = document.createElement("div"), key = document.createElement("i");
    row.className = `c${line.colour}`;
    row.append(key, `${line.label} ${Number(value.toPrecision(4))}`);
    tip.append(row);
  }
  tip.hidden = false;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
}

// Names of the curves beside the picture's title.
function legends() {
  for (const svg of document.querySelectorAll("svg[data-chart]")) {
    const chart = (svg.chart ??= JSON.parse(svg.dataset.chart));
    if (chart.lines.length < 2) continue;
    const keys = document.createElement("span");
    keys.className = "keys";
    for (const line of chart.lines) {
      const key = document.createElement("span"), mark = document.createElement("i");
      mark.style.background = `var(--c${line.colour})`;
      key.append(mark, line.label);
      keys.append(key);
    }
    svg.previousElementSibling.append(keys);
  }
}

document.addEventListener("pointermove", (event) => {
  const svg = event.target.closest?.("svg[data-chart]");
  if (svg) describe(svg, event);
  else tip.hidden = true;
});
document.addEventListener("click", (event) => {
  const wanted = event.target.dataset?.set;
  if (wanted) document.documentElement.dataset.colour = wanted;
  for (const each of document.querySelectorAll("[data-set]"))
    each.ariaPressed = String(each.dataset.set === document.documentElement.dataset.colour);
});

// Episodes in the order and of the kind that the reader has chosen. The choice outlives a new sample of the run.
const chosen = { sort: "step", outcome: "", containing: "" };
const touched = new Set();

function arrange() {
  const list = document.getElementById("list");
  if (!list) return;
  for (const name in chosen) document.getElementById(name).value = chosen[name];
  const key = chosen.sort.replace("-", ""), sign = chosen.sort.startsWith("-") ? -1 : 1;
  const wanted = chosen.containing.toLowerCase();
  const episodes = [...list.children];
  // Sorting is stable: episodes that are equal stay in the order of their steps.
  episodes.sort((a, b) => a.dataset.step - b.dataset.step);
  episodes.sort((a, b) => sign * (a.dataset[key] - b.dataset[key]));
  let shown = 0;
  for (const each of episodes) {
    each.hidden = (chosen.outcome && each.dataset.outcome !== chosen.outcome) ||
      (wanted && !(each.words ??= each.textContent.toLowerCase()).includes(wanted));
    shown += !each.hidden;
  }
  list.append(...episodes);
  document.getElementById("shown").textContent =
    shown === episodes.length ? `${shown} shown` : `${shown} of ${episodes.length} shown`;
}

document.addEventListener("input", (event) => {
  if (!(event.target.id in chosen)) return;
  chosen[event.target.id] = event.target.value;
  arrange();
});
document.addEventListener("click", (event) => {
  const episode = event.target.closest?.("summary")?.parentElement;
  if (episode?.classList.contains("episode")) touched.add(episode.id);
});
legends();
arrange();

// What a new sample replaces: episodes that the reader has opened stay, also where the sample has others by now.
function keepOpened(fresh) {
  const list = fresh.getElementById("list");
  for (const each of document.querySelectorAll("#list > [open]"))
    if (list && touched.has(each.id) && !fresh.getElementById(each.id)) list.append(document.adoptNode(each));
}

// A page that follows a run: what is open stays open, where one reads stays in sight, and a choice stays made.
if ("live" in document.documentElement.dataset) {
  new EventSource("events").onmessage = async () => {
    const answer = await fetch("");
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const open = new Map([...document.querySelectorAll("details[id]")].map((each) => [each.id, each.open]));
    for (const each of fresh.querySelectorAll("details[id]")) {
      if (open.has(each.id)) each.open = open.get(each.id);
      else if (touched.size) each.open = false;
    }
    const focused = document.activeElement?.id;
    keepOpened(fresh);
    for (const part of ["header", "main"]) document.querySelector(part).replaceWith(fresh.querySelector(part));
    legends();
    const outcomes = document.getElementById("outcome");
    // The new sample may have none of the outcome that is chosen.
    if (outcomes && ![...outcomes.options].some((each) => each.value === chosen.outcome))
      outcomes.add(new Option(chosen.outcome.replaceAll("_", " "), chosen.outcome));
    arrange();
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  };
}
