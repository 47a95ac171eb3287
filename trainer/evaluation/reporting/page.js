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
});
legends();

// A page that follows a run: what is open stays open, and where one reads stays in sight.
if ("live" in document.documentElement.dataset) {
  new EventSource("events").onmessage = async () => {
    const answer = await fetch("");
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const open = new Map([...document.querySelectorAll("details[id]")].map((each) => [each.id, each.open]));
    for (const each of fresh.querySelectorAll("details[id]")) if (open.has(each.id)) each.open = open.get(each.id);
    for (const part of ["header", "main"]) document.querySelector(part).replaceWith(fresh.querySelector(part));
    legends();
  };
}
