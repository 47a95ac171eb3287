// Observations on the page: text as text, arrays in short form, pictures as pictures.

import { h } from "./dom.js";

const PICTURES = new Set(["image/png", "image/jpeg", "image/gif", "image/webp"]);
const SHOWN_NUMBERS = 64;
const SMALLEST_PICTURE = 8;
const SHORT_LINE = 80;
const LONGEST_DRAWN = 140;
const READERS = {
  bool: (view, at) => view.getUint8(at),
  int8: (view, at) => view.getInt8(at),
  int16: (view, at) => view.getInt16(at, true),
  int32: (view, at) => view.getInt32(at, true),
  int64: (view, at) => Number(view.getBigInt64(at, true)),
  uint8: (view, at) => view.getUint8(at),
  uint16: (view, at) => view.getUint16(at, true),
  uint32: (view, at) => view.getUint32(at, true),
  uint64: (view, at) => Number(view.getBigUint64(at, true)),
  float32: (view, at) => view.getFloat32(at, true),
  float64: (view, at) => view.getFloat64(at, true),
};

/** A node that shows a value in JSON's encoding; the space says what lists of numbers are. */
export function showValue(value, space) {
  if (typeof value === "string") return showText(value);
  const array = arrayOf(value, space);
  if (array !== null) return isPicture(array) ? pictureOf(array) : h("pre", {}, shortArray(array));
  if (value?.__bytes__) return showBytes(...value.__bytes__);
  if (space?.type === "Dict" && value !== null && typeof value === "object") {
    return h(
      "dl",
      { class: "parts" },
      Object.entries(value).map(([key, part]) => [
        h("dt", {}, key),
        h("dd", {}, showValue(part, space.spaces[key])),
      ]),
    );
  }
  if (space?.type === "Tuple" && Array.isArray(value)) {
    return h(
      "ol",
      { class: "parts", start: "0" },
      value.map((part, index) => h("li", {}, showValue(part, space.spaces[index]))),
    );
  }
  const line = inLine(value, space);
  return h("pre", {}, line.length <= SHORT_LINE ? line : pretty(value));
}

/** A text; prose is broken where the page ends, a drawing never is. */
function showText(text) {
  return h("pre", { class: isDrawing(text) ? "text drawing" : "text" }, text === "" ? "(empty text)" : text);
}

/** Whether lines stand below each other on purpose: several of one length, and none as long as prose. */
function isDrawing(text) {
  const lengths = text.split("\n").map((line) => line.length);
  if (lengths.some((length) => length > LONGEST_DRAWN)) return false;
  return lengths.some(
    (length, index) => length > 1 && length === lengths[index + 1] && length === lengths[index + 2],
  );
}

/** A value in a line of text. */
export function inLine(value, space) {
  if (typeof value === "string") return value;
  const array = arrayOf(value, space);
  return array === null ? JSON.stringify(value) : shortArray(array);
}

/** A value as JSON for people; arrays in bytes are told, not shown. */
export function pretty(value) {
  const told = (_, part) => {
    const array = part?.__nd__ ? arrayOf(part) : null;
    return array === null ? part : shortArray(array);
  };
  return JSON.stringify(value, told, 2);
}

function arrayOf(value, space) {
  if (value?.__nd__) return decode(...value.__nd__);
  if (space?.type !== "Box" || !Array.isArray(value)) return null;
  return { dtype: space.dtype, shape: space.shape, numbers: value.flat(Infinity).map(Number) };
}

function decode(dtype, shape, content) {
  const size = shape.reduce((product, side) => product * side, 1);
  const read = READERS[dtype];
  if (read === undefined) return { dtype, shape, numbers: [] };
  const bytes = bytesOf(content);
  const view = new DataView(bytes.buffer);
  const width = size === 0 ? 1 : bytes.length / size;
  return { dtype, shape, numbers: Array.from({ length: size }, (_, index) => read(view, index * width)) };
}

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

function isPicture({ dtype, shape }) {
  const [height, width, channels = 1] = shape;
  const sides = shape.length === 2 || (shape.length === 3 && [1, 3, 4].includes(channels));
  return dtype === "uint8" && sides && Math.min(height, width) >= SMALLEST_PICTURE;
}

function pictureOf({ shape, numbers }) {
  const [height, width, channels = 1] = shape;
  const pixels = new ImageData(width, height);
  for (let index = 0; index < width * height; index += 1) {
    const at = index * channels;
    const [red, green, blue] = channels < 3 ? [at, at, at] : [at, at + 1, at + 2];
    pixels.data.set(
      [numbers[red], numbers[green], numbers[blue], channels === 4 ? numbers[at + 3] : 255],
      index * 4,
    );
  }
  const canvas = h("canvas", {
    width,
    height,
    role: "img",
    "aria-label": `Picture of ${width} by ${height} pixels`,
  });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}

function showBytes(mediaType, content) {
  if (PICTURES.has(mediaType)) {
    return h("img", { src: `data:${mediaType};base64,${content}`, alt: `Picture (${mediaType})` });
  }
  return h("pre", {}, `${Math.floor((content.length * 3) / 4)} bytes of ${mediaType}`);
}

function shortArray({ dtype, shape, numbers }) {
  const name = `${dtype} [${shape.join(", ")}]`;
  if (numbers.length === 0) return name;
  if (numbers.length <= SHOWN_NUMBERS) return `${name}  ${numbers.map(shortNumber).join("  ")}`;
  let [low, high] = [Infinity, -Infinity];
  for (const number of numbers) {
    low = Math.min(low, number);
    high = Math.max(high, number);
  }
  const first = numbers
    .slice(0, SHOWN_NUMBERS / 8)
    .map(shortNumber)
    .join("  ");
  return `${name}  from ${shortNumber(low)} to ${shortNumber(high)}:  ${first}  …`;
}

/** A number with as many digits as people read. */
export function shortNumber(number) {
  return Number.isInteger(number) ? String(number) : String(Number(number.toPrecision(5)));
}
