// The server's calls: HTTP for what is read once, one WebSocket for sessions.

const TOKEN_KEY = "rollgym.token";
const PROTOCOL = "rollgym.v1.json";
const GONE = "disconnected";
// With these the protocol answers a repeated request as it did the first time.
const NAMED = new Set(["make", "reset", "restore"]);

/** A documented failure of the protocol, or the loss of the connection. */
export class Problem extends Error {
  constructor(problem) {
    super(problem.detail ?? String(problem.title ?? "the server gave no reason"));
    this.code = problem.code ?? "error";
    this.problem = problem;
  }
}

function disconnected(detail) {
  return new Problem({ code: GONE, detail });
}

export class Server {
  /** @param {URL} base the address under which the server's paths are */
  constructor(base) {
    this.base = base;
    this.pending = new Map();
    this.lastId = 0;
    /** @type {Promise<WebSocket> | null} */
    this.socket = null;
    this.onunauthorized = () => {};
  }

  get token() {
    return sessionStorage.getItem(TOKEN_KEY) ?? "";
  }

  set token(token) {
    if (token) sessionStorage.setItem(TOKEN_KEY, token);
    else sessionStorage.removeItem(TOKEN_KEY);
    this.close();
  }

  // -- HTTP

  async json(path, method = "GET", value = undefined) {
    const text = await this.text(path, method, value);
    return text ? JSON.parse(text) : null;
  }

  async text(path, method = "GET", value = undefined) {
    const headers = {
      ...(this.token && { Authorization: `Bearer ${this.token}` }),
      ...(value !== undefined && { "Content-Type": "application/json" }),
    };
    let reply;
    try {
      reply = await fetch(new URL(path, this.base), {
        method,
        headers,
        body: value === undefined ? undefined : JSON.stringify(value),
        credentials: "omit",
        redirect: "error",
      });
    } catch {
      throw disconnected("the server does not answer");
    }
    const text = await reply.text();
    if (!reply.ok) throw this.refused(problemOf(reply, text));
    return text;
  }

  refused(problem) {
    if (problem.code === "unauthorized") this.onunauthorized(problem);
    return problem;
  }

  // -- the socket

  /** Run an operation; one whose connection broke is asked once more, which the protocol makes safe. */
  async call(op, fields = {}) {
    const request = NAMED.has(op) ? { ...fields, request_id: requestId() } : fields;
    try {
      return await this.ask(op, request);
    } catch (error) {
      if (error.code !== GONE) throw error;
      return this.ask(op, request);
    }
  }

  async ask(op, fields) {
    this.socket ??= this.connect();
    return this.send(await this.socket, op, fields);
  }

  async connect() {
    const url = new URL("v1/ws", this.base);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const socket = new WebSocket(url, [PROTOCOL]);
    const opened = new Promise((resolve, reject) => {
      socket.onopen = resolve;
      socket.onclose = () => {
        reject(
          disconnected(
            "the server took no connection; behind a proxy, its operator may have to name this page in allowed_origins",
          ),
        );
        this.dropped(socket);
      };
    });
    socket.onmessage = (event) => this.take(JSON.parse(event.data));
    try {
      await opened;
      if (this.token) await this.send(socket, "auth", { token: this.token });
    } catch (error) {
      this.socket = null;
      socket.close();
      throw error;
    }
    return socket;
  }

  send(socket, op, fields) {
    if (socket.readyState !== WebSocket.OPEN) throw disconnected("the connection to the server broke");
    this.lastId += 1;
    const id = this.lastId;
    socket.send(JSON.stringify({ ...fields, id, op }));
    return new Promise((resolve, reject) => this.pending.set(id, { resolve, reject, socket }));
  }

  take(frame) {
    const waiting = this.pending.get(frame.id);
    if (waiting === undefined) return;
    this.pending.delete(frame.id);
    if (frame.error) waiting.reject(this.refused(new Problem(frame.error)));
    else waiting.resolve(frame.ok);
  }

  dropped(socket) {
    this.socket = null;
    for (const [id, waiting] of this.pending) {
      if (waiting.socket !== socket) continue;
      this.pending.delete(id);
      waiting.reject(disconnected("the connection to the server broke"));
    }
  }

  close() {
    this.socket?.then(
      (socket) => socket.close(),
      () => {},
    );
    this.socket = null;
  }
}

function problemOf(reply, text) {
  try {
    return new Problem({
      ...JSON.parse(text),
      retry_after: Number(reply.headers.get("Retry-After")) || undefined,
    });
  } catch {
    return new Problem({ code: String(reply.status), detail: `the server answered ${reply.status}` });
  }
}

function requestId() {
  // `crypto.randomUUID` is missing where a page came over plain HTTP.
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) =>
    byte.toString(16).padStart(2, "0"),
  ).join("");
}
