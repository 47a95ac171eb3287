// An environment behind HTTP in JavaScript, on Node's standard library: node examples/http_environment.mjs PORT [ADDRESS]
import { createServer } from "node:http";

const secrets = new Map();
const calls = {
  "/spec": () => ({ version: "1", deterministic: true, description: "Guess a number." }),
  "/reset": ({ session_id, seed }) => {
    secrets.set(session_id, String(seed % 10));
    return { observation: "Guess a number from 0 to 9.", info: { instruction: "Answer with one number." } };
  },
  "/step": ({ session_id, action }) => {
    const right = action.trim() === secrets.get(session_id);
    const observation = right ? "Right." : `No, not ${action}.`;
    return { observation, reward: right ? 1 : 0, terminated: right, truncated: false, info: { success: right } };
  },
  "/close": ({ session_id }) => (secrets.delete(session_id), {}),
};

createServer(async (request, response) => {
  const parts = await request.toArray();
  const reply = calls[request.url](parts.length ? JSON.parse(Buffer.concat(parts)) : {});
  response.end(JSON.stringify(reply));
}).listen(Number(process.argv[2]), process.argv[3] ?? "127.0.0.1");
