// The HTTP calls for people, from the server's own OpenAPI document.

import { fill, h } from "./dom.js";

const METHODS = ["get", "post", "delete"];

async function run() {
  const reply = await fetch(new URL("../openapi.json", import.meta.url), { credentials: "omit" });
  const document_ = await reply.json();
  const calls = Object.entries(document_.paths).flatMap(([path, item]) =>
    METHODS.filter((method) => method in item).map((method) =>
      section(document_, method, path, item[method]),
    ),
  );
  fill(document.getElementById("calls"), calls);
}

function section(document_, method, path, call) {
  const [status, good] = Object.entries(call.responses)[0];
  return h(
    "section",
    { class: "card call" },
    h("h2", {}, h("span", { class: "tag" }, method.toUpperCase()), " ", h("code", {}, path)),
    h("p", {}, `${call.summary}. `, h("span", { class: "hint" }, `Answers ${status}.`)),
    fieldsTable("Parameters", (call.parameters ?? []).map(parameterRow)),
    fieldsTable("Body", rowsOf(document_, call.requestBody)),
    fieldsTable("Answer", rowsOf(document_, good)),
  );
}

function parameterRow(parameter) {
  return [parameter.name, `${parameter.in}, ${typeOf(parameter.schema)}`, parameter.schema.description];
}

/** Name, type and meaning of the fields of a body. */
function rowsOf(document_, body) {
  const schema = resolve(document_, body?.content?.["application/json"]?.schema);
  return variants(document_, schema).flatMap((each) =>
    Object.entries(each.properties ?? {}).map(([name, part]) => [
      name,
      `${typeOf(part)}${each.required?.includes(name) ? "" : ", optional"}`,
      part.description ?? resolve(document_, part)?.description,
    ]),
  );
}

function variants(document_, schema) {
  if (schema?.anyOf) return schema.anyOf.map((each) => resolve(document_, each));
  return schema ? [schema] : [];
}

function resolve(document_, schema) {
  return schema?.$ref ? document_.components.schemas[schema.$ref.split("/").at(-1)] : schema;
}

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" | ");
  if (schema.type === "array" && schema.items) return `list of ${typeOf(schema.items)}`;
  return schema.type ?? "any JSON";
}

function fieldsTable(caption, rows) {
  if (rows.length === 0) return null;
  return h(
    "table",
    {},
    h("caption", {}, caption),
    h(
      "tbody",
      {},
      rows.map(([name, type, meaning]) =>
        h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, type), h("td", {}, meaning)),
      ),
    ),
  );
}

await run();
