// Prometheus' text format, as far as sums and rates need it.

const SAMPLE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** The samples of a text: name, labels and value. */
export function parseMetrics(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (found === null) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) labels[name] = unescape(value);
    samples.push({ name: found[1], labels, value: Number(found[3]) });
  }
  return samples;
}

function unescape(value) {
  return value.replace(/\\(.)/g, (_, character) => (character === "n" ? "\n" : character));
}

/** The sum of a metric. */
export function total(samples, name) {
  return samples.reduce((sum, sample) => (sample.name === name ? sum + sample.value : sum), 0);
}

/** The sums of a metric by one label. */
export function totalsBy(samples, name, label) {
  const sums = new Map();
  for (const sample of samples) {
    if (sample.name !== name || !(label in sample.labels)) continue;
    sums.set(sample.labels[label], (sums.get(sample.labels[label]) ?? 0) + sample.value);
  }
  return sums;
}
