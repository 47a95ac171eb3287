// Gymnasium's spaces as the wire describes them: in words, and a value to begin with.

/** Say what a space holds. */
export function describeSpace(space) {
  switch (space.type) {
    case "UnicodeText":
      return "any text";
    case "Text":
      return `text of ${space.min_length} to ${space.max_length} characters`;
    case "Discrete":
      return `Discrete: ${space.start} to ${space.start + space.n - 1}`;
    case "Box":
      return `Box ${space.dtype} [${space.shape.join(", ")}]${describeBounds(space)}`;
    case "MultiDiscrete":
      return `MultiDiscrete ${JSON.stringify(space.nvec)}`;
    case "MultiBinary":
      return `MultiBinary ${JSON.stringify(space.n)}`;
    case "Dict":
      return `Dict { ${Object.entries(space.spaces)
        .map(([key, part]) => `${key}: ${describeSpace(part)}`)
        .join("; ")} }`;
    case "Tuple":
      return `Tuple ( ${space.spaces.map(describeSpace).join("; ")} )`;
    case "OneOf":
      return `one of ( ${space.spaces.map(describeSpace).join("; ")} )`;
    case "Sequence":
      return `any number of ( ${describeSpace(space.space)} )`;
    default:
      return space.type;
  }
}

function describeBounds(space) {
  const plain = (bound) => typeof bound === "number" || typeof bound === "string";
  return plain(space.low) && plain(space.high) ? ` from ${space.low} to ${space.high}` : "";
}

export function isText(space) {
  return space.type === "UnicodeText" || space.type === "Text";
}

/** A value of a space, in JSON's encoding, for a person to change; null where there is no simple one. */
export function exampleOf(space) {
  switch (space.type) {
    case "UnicodeText":
    case "Text":
      return "";
    case "Discrete":
      return space.start;
    case "Box":
      return zeros(space.shape, (path) => withinBounds(space, path));
    case "MultiDiscrete":
      return space.start ?? zeros(shapeOf(space.nvec), () => 0);
    case "MultiBinary":
      return zeros([space.n].flat(), () => 0);
    case "Dict":
      return Object.fromEntries(Object.entries(space.spaces).map(([key, part]) => [key, exampleOf(part)]));
    case "Tuple":
      return space.spaces.map(exampleOf);
    case "OneOf":
      return [0, exampleOf(space.spaces[0])];
    case "Sequence":
      return [];
    default:
      return null;
  }
}

function zeros(shape, value, path = []) {
  if (shape.length === 0) return value(path);
  return Array.from({ length: shape[0] }, (_, index) => zeros(shape.slice(1), value, [...path, index]));
}

function shapeOf(list) {
  return Array.isArray(list) ? [list.length, ...shapeOf(list[0])] : [];
}

/** Zero, or the bound that is nearest to it. */
function withinBounds(space, path) {
  const low = boundAt(space.low, path, -Infinity);
  const high = boundAt(space.high, path, Infinity);
  return Math.min(Math.max(0, low), high);
}

function boundAt(bound, path, unknown) {
  let part = bound;
  for (const index of path) if (Array.isArray(part)) part = part[index];
  return typeof part === "number" ? part : unknown;
}
