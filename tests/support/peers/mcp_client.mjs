// A TypeScript client of the Model Context Protocol on a server of ours: its generation (1 or 2), and the server's URL.
import assert from "node:assert/strict";

const [generation, url] = process.argv.slice(2);
const { Client, Transport } = await load();

async function load() {
  if (generation === "2") {
    const { Client, StreamableHTTPClientTransport } = await import("@modelcontextprotocol/client");
    return { Client, Transport: StreamableHTTPClientTransport };
  }
  const { Client } = await import("@modelcontextprotocol/sdk/client/index.js");
  const { StreamableHTTPClientTransport } = await import("@modelcontextprotocol/sdk/client/streamableHttp.js");
  return { Client, Transport: StreamableHTTPClientTransport };
}

async function connected(path) {
  const transport = new Transport(new URL(`${url}/mcp/${path}`));
  const client = new Client({ name: "rollgym-checks", version: "1.0.0" });
  await client.connect(transport);
  return { client, transport };
}

const text = (result) => result.content.map((part) => part.text).join("");

async function tools() {
  const { client, transport } = await connected("ToolUse-v0?seed=3");
  assert.match(client.getInstructions(), /help of tools/);
  assert.equal(client.getServerVersion().title, "ToolUse-v0");
  await client.ping();
  const names = (await client.listTools()).tools.map((tool) => tool.name);
  assert.deepEqual(names.slice(0, 2), ["reset", "step"]);
  const call = (name, given) => client.callTool({ name, arguments: given });
  const right = await call("calculator", { expression: "6 * 7" });
  assert.equal(text(right), "42");
  assert.equal(right.isError, false);
  assert.equal(right._meta["rollgym/answer"].terminated, false);
  for (const wrong of [{ expression: "1 / 0" }, { formula: "1" }]) {
    assert.equal((await call("calculator", wrong)).isError, true);
  }
  await assert.rejects(call("fly", {}), { code: -32602 });
  const over = await call("step", { action: "<answer>none</answer>" });
  assert.match(text(over), /The episode has ended/);
  assert.equal((await call("calculator", { expression: "1" })).isError, true);
  assert.equal((await call("reset", { seed: 4 })).isError, false);
  assert.equal(text(await call("calculator", { expression: "1" })), "1");
  await transport.terminateSession();
  assert.equal(transport.sessionId, undefined);
  await client.close();
}

// A client that gives up a call says so, and its session takes the next one long before the step would have ended.
async function cancelled() {
  const { client } = await connected("SlowCount");
  const slow = client.callTool({ name: "step", arguments: { action: "sleep 60" } }, ...limit(500));
  await assert.rejects(slow, /timed out/i);
  const patience = performance.now() + 20_000;
  // The notification and the next call come over connections of their own, in either order.
  let begun;
  do begun = await client.callTool({ name: "reset", arguments: {} }, ...limit(20_000));
  while (/a step is running/.test(text(begun)) && performance.now() < patience);
  assert.equal(begun.isError, false, text(begun));
  await client.close();
}

// The first generation takes a schema of results between a call and its options.
const limit = (timeout) => (generation === "2" ? [{ timeout }] : [undefined, { timeout }]);

// A session that has ended elsewhere is an error of every message, so that a client begins another.
async function gone() {
  const { client, transport } = await connected("ToolUse-v0");
  const headers = { "Mcp-Session-Id": transport.sessionId };
  assert.equal((await fetch(`${url}/mcp/ToolUse-v0`, { method: "DELETE", headers })).status, 204);
  await assert.rejects(client.ping());
  await assert.rejects(client.listTools());
  await client.close();
}

for (const check of [tools, cancelled, gone]) await check();
console.log(`MCP: the TypeScript client of generation ${generation} plays`);
