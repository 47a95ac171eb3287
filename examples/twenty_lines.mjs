// A whole environment on Node's standard library (reply with a vowel): node examples/twenty_lines.mjs 9000
import { createServer } from "node:http";

function answer(path, { action }) {
  if (path === "/reset") return { observation: "Your turn.", info: { instruction: "Reply with a vowel." } };
  if (path !== "/step") return {};
  const success = action !== "" && "aeiou".includes(action[0]);
  return { observation: "Over.", reward: Number(success), terminated: true, truncated: false, info: { success } };
}

createServer(async (request, response) => {
  let body = "";
  for await (const part of request) body += part;
  response.end(JSON.stringify(answer(request.url, JSON.parse(body || "{}"))));
}).listen(Number(process.argv[2]), "127.0.0.1");
