// The episodes of a run, `episodes.jsonl`: one a line, with what the policy saw and said. The file may be large, so only
// what the list shows is kept of each line, and where it stands.

const NEW_LINE = 10;
const LONGEST_FIRST_LINE = 64 * 2 ** 20;

/** Whether a file holds the episodes of a run: its first line is one. */
export async function isRunFile(file) {
  for await (const line of linesOf(file.slice(0, LONGEST_FIRST_LINE))) return parsed(line.text) !== null;
  return false;
}

/**
 * Read a run's episodes.
 * @param {File} file
 * @param {(bytes: number) => boolean} progress told how far it is; false ends the reading
 * @returns {Promise<{entries: object[], bad: number[], torn: boolean}>} what is known of each episode; the numbers of
 *   lines that are none; whether the last line was not yet written to its end
 */
export async function readRun(file, progress) {
  const [entries, bad] = [[], []];
  let [number, torn] = [0, false];
  for await (const { text, start, end, whole } of linesOf(file)) {
    number += 1;
    const episode = parsed(text);
    if (episode !== null) entries.push(summaryOf(episode, number, start, end));
    else if (!whole) torn = true;
    else if (text.trim() !== "") bad.push(number);
    if (!progress(end)) break;
  }
  return { entries, bad, torn };
}

/**
 * Read one episode of the file again.
 * @throws {Error} the file is no longer what it was
 */
export async function readEntry(file, entry) {
  let text = "";
  try {
    text = await file.slice(entry.start, entry.end).text();
  } catch {
    // A browser lets nobody read on in a file that was written to since it was chosen.
  }
  const episode = parsed(text);
  if (episode === null) throw new Error("the file has changed since it was chosen: choose it again");
  return episode;
}

function summaryOf({ step, task, member, outcome, reward, turns }, number, start, end) {
  return { number, start, end, step, member, outcome, reward, envId: task.env_id, seed: task.seed, turns: turns.filter((turn) => !turn.is_summary).length };
}

/** An episode of a run without its tokens; null where a text is none. */
function parsed(text) {
  try {
    const { segments: _, ...episode } = JSON.parse(text);
    const played = Array.isArray(episode.turns) && episode.turns.every((turn) => turn !== null && typeof turn === "object");
    return played && typeof episode.task?.env_id === "string" ? episode : null;
  } catch {
    return null;
  }
}

/** The lines of a file with the places of their bytes. */
async function* linesOf(file) {
  const reader = file.stream().getReader();
  const decoder = new TextDecoder();
  let [parts, start, position] = [[], 0, 0];
  const line = (whole) => ({
    text: parts.map((part) => decoder.decode(part, { stream: true })).join("") + decoder.decode(),
    start,
    end: position,
    whole,
  });
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      let from = 0;
      for (let at = value.indexOf(NEW_LINE); at >= 0; at = value.indexOf(NEW_LINE, from)) {
        parts.push(value.subarray(from, at));
        position += at + 1 - from;
        yield line(true);
        [parts, start, from] = [[], position, at + 1];
      }
      parts.push(value.slice(from));
      position += value.length - from;
    }
    if (position > start) yield line(false);
  } finally {
    // Whoever has seen enough lets the rest be.
    await reader.cancel();
  }
}
