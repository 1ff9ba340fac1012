// A client of Antiphon over NATS: docs/nats-client.md, in JavaScript.
//
//     const client = await Client.connect({ servers: "nats://127.0.0.1:4222" });
//     const messages = [{ role: "user", content: "What colour is the sky?" }];
//     const stream = client.generate({ model: "antiphon-small", messages, resume_s: 30 });
//     for await (const { text } of stream) process.stdout.write(text);
//     console.log(stream.end.usage);
//     await client.close();
//
// Each byte of the text is yielded once and in order, despite lost messages, lost connections and,
// with `resume_s`, the death of a gateway. Leaving the loop cancels the request.

import { randomUUID } from "node:crypto";
import { decode, encode } from "@msgpack/msgpack";
import { connect } from "@nats-io/transport-node";

const SILENCE_MS = 2000; // without progress for so long, the client asks again
const CALL_TIMEOUT_MS = 2000;
const NO_RESPONDERS_MS = 6000; // gateways may need a while to find a broker again
const TIMEOUT_S = 600;
const TRANSIENT = ["unavailable", "overloaded", "rate_limit_exceeded", "deadline", "wrong_term"];
const FORMATS = {
  json: {
    write: (message) => Buffer.from(JSON.stringify(message)),
    read: (data) => JSON.parse(Buffer.from(data).toString()),
  },
  msgpack: { write: encode, read: decode },
};

/** An error of Antiphon, with its `code`, or of this client. */
export class AntiphonError extends Error {
  constructor({ code, message, param, retry_after_s }) {
    super(message);
    Object.assign(this, { code, param, retryAfterS: retry_after_s });
  }
}

/** A connection to the gateways of one cluster. */
export class Client {
  #nats;
  #up = true;

  /**
   * `format` is "msgpack" or "json"; other options are those of nats.js: `servers`, `user`, `pass`.
   */
  static async connect({ cluster, tenant, apiKey, format, ...options }) {
    const client = new Client();
    client.apiKey = apiKey;
    client.format = FORMATS[format ?? "msgpack"];
    client.prefix = `${cluster ?? "antiphon"}.v1`;
    client.inboxes = `${client.prefix}.client.${escapeName(tenant ?? "default")}`;
    client.#nats = await connect({
      maxReconnectAttempts: -1,
      reconnectTimeWait: 200,
      ...options,
      inboxPrefix: client.inboxes,
    });
    client.#watch();
    return client;
  }

  /** Start a request with the fields of GenerateRequest; iterate over the result. */
  generate(request) {
    return new GenerationStream(this, { key: randomUUID(), timeout_s: TIMEOUT_S, ...request });
  }

  /** Return all choices as { choice, text, finish_reason, details }, and the usage. */
  async complete(request) {
    const stream = this.generate({ ...request, stream: request.details !== undefined });
    const outputs = new Map();
    for await (const { choice, text, details } of stream) {
      const output = outputs.get(choice) ?? { text: "", details: [] };
      outputs.set(choice, { text: output.text + text, details: [...output.details, details] });
    }
    const choices = stream.end.choices.map(({ choice, finish_reason }) => {
      const { text, details } = outputs.get(choice) ?? { text: "", details: [] };
      return { choice, finish_reason, text, details: details.filter((each) => each !== null) };
    });
    return { choices, usage: stream.end.usage, request_id: stream.end.request_id };
  }

  async close() {
    await this.#nats.close();
  }

  subscribe(inbox, receive) {
    const callback = (error, message) => {
      if (error) return;
      const lost = message.data.length === 0 && message.headers?.code === 503;
      receive(lost ? { type: "NoResponders" } : this.format.read(message.data));
    };
    return this.#nats.subscribe(inbox, { callback });
  }

  /** Publish if connected: nothing is to be sent later, from an earlier state. */
  publish(subject, message, reply) {
    if (this.#up) this.#nats.publish(subject, this.format.write(message), { reply });
  }

  /** Send a request; return its reply, of type NoResponders or Unanswered if there is none. */
  async call(subject, message) {
    if (!this.#up) return { type: "Disconnected" };
    try {
      const data = this.format.write(message);
      const reply = await this.#nats.request(subject, data, { timeout: CALL_TIMEOUT_MS });
      return this.format.read(reply.data);
    } catch (error) {
      if (!this.#up) return { type: "Disconnected" };
      return { type: error.isNoResponders?.() ? "NoResponders" : "Unanswered" };
    }
  }

  async #watch() {
    for await (const { type } of this.#nats.status()) {
      if (type === "disconnect") this.#up = false;
      if (type === "reconnect") this.#up = true;
    }
  }
}

/** One request, from its submission to its end. Yields { choice, text, details }. */
class GenerationStream {
  end = null; // GenerateEnd, once it was received
  #client;
  #request;
  #inbox;
  #events = [];
  #wake = () => {};
  #accepted = null;
  #received = new Assembler(0);
  #textBeforeAccept = false;
  #submitted = 0;
  #retryAt = 0;
  #resumedFrom = null; // a gap is asked for once: what follows it shows it again
  #silentSince = null; // since when there has been no responder
  #lostSince = null; // since when the gateway is lost

  constructor(client, request) {
    this.#client = client;
    this.#request = { type: "GenerateRequest", api_key: client.apiKey ?? null, ...request };
    this.#inbox = `${client.inboxes}.${randomUUID()}`;
  }

  async *[Symbol.asyncIterator]() {
    // Later than that of the gateway, whose error comes first if it can be reached.
    const deadline = Date.now() + 1000 * this.#request.timeout_s + SILENCE_MS;
    const subscription = this.#client.subscribe(this.#inbox, (event) => {
      this.#events.push(event);
      this.#wake();
    });
    try {
      await this.#retry();
      while (this.end === null) {
        const event = await this.#next(Math.min(deadline, this.#retryAt));
        if (event === undefined) {
          if (Date.now() >= deadline) throw failure("deadline", "the response did not end in time");
          await this.#retry();
          continue;
        }
        for (const chunk of await this.#apply(event)) {
          yield chunk;
          this.#progress(); // the time that the caller took is no silence
        }
      }
    } finally {
      subscription.unsubscribe();
      if (this.end === null && this.#accepted !== null) await this.#cancel(this.#accepted);
    }
  }

  async #next(until) {
    if (this.#events.length === 0) {
      let timer;
      await new Promise((resolve) => {
        this.#wake = resolve;
        timer = setTimeout(resolve, Math.max(0, until - Date.now()));
      });
      clearTimeout(timer);
    }
    return this.#events.shift();
  }

  /** Return what is new in a message, as chunks. */
  async #apply(event) {
    const other = event.request_id !== this.#accepted?.request_id;
    switch (event.type) {
      case "NoResponders":
        this.#onNoResponders();
        break;
      case "ErrorReply":
        this.#onRejection(new AntiphonError(event));
        break;
      case "GenerateAccepted":
        await this.#accept(event, other);
        break;
      case "GenerateText":
        if (this.#accepted === null) this.#textBeforeAccept = true;
        else if (!other) return await this.#assemble(event);
        break;
      case "GenerateEnd":
        if (this.#accepted === null) this.#textBeforeAccept = true;
        else if (!other) return await this.#finish(event);
        break;
    }
    return [];
  }

  async #accept(accepted, other) {
    if (this.#accepted === null) {
      this.#accepted = accepted;
      this.#received = new Assembler(accepted.details_from ?? 0);
      this.#progress();
      if (this.#textBeforeAccept) await this.#retry();
    } else if (other) {
      await this.#cancel(accepted); // a retry has reached another gateway
    } else if (accepted.gateway !== this.#accepted.gateway || this.#lostSince !== null) {
      this.#accepted = accepted;
      this.#lostSince = null;
      this.#progress();
    }
  }

  async #assemble(piece) {
    const added = this.#received.add(piece);
    if (added === null) await this.#resumeOnce();
    else if (added.text || added.details) return [added];
    return [];
  }

  async #finish(end) {
    if (end.error) {
      this.end = end;
      throw new AntiphonError(end.error);
    }
    const whole = [];
    for (const { choice, text, text_bytes, details, details_end } of end.choices) {
      if (typeof text === "string") {
        whole.push({ choice, text, details: details ? parseDetails(details) : null });
      } else if (!this.#received.has(choice, text_bytes, details_end ?? 0)) {
        await this.#resumeOnce();
        return [];
      }
    }
    this.end = end;
    return whole;
  }

  #progress() {
    this.#retryAt = Date.now() + SILENCE_MS;
    this.#silentSince = null;
  }

  async #resumeOnce() {
    if (this.#resumedFrom !== JSON.stringify(this.#received.places)) await this.#retry();
  }

  async #retry() {
    this.#retryAt = Date.now() + SILENCE_MS;
    if (this.#accepted === null) {
      this.#submitted += 1;
      this.#submit(this.#request);
    } else if (this.#lostSince === null) {
      await this.#resume(this.#accepted);
    } else {
      this.#resumeAnywhere();
    }
  }

  #submit(request) {
    const subject = `${this.#client.prefix}.generate.${escapeName(request.model)}`;
    this.#client.publish(subject, request, this.#inbox);
  }

  /** Ask the gateway that has the output for what is missing. */
  async #resume({ request_id }) {
    const { places } = this.#received;
    this.#resumedFrom = JSON.stringify(places);
    const reply = await this.#control(this.#accepted, { type: "GenerateResume", request_id, places });
    if (reply.type === "GenerateDone") this.#silentSince = null;
    const lost = reply.type === "ErrorReply" && reply.code === "invalid_request";
    const gone = reply.type === "NoResponders";
    if (this.#request.resume_s && (lost || gone || reply.type === "Unanswered")) {
      this.#lostSince = Date.now();
      this.#resumeAnywhere();
    } else if (gone) {
      this.#onNoResponders();
    } else if (lost) {
      throw failure("unavailable", "the gateway of this request has forgotten it");
    }
  }

  /** Send the request again with what was received of its response, to any gateway. */
  #resumeAnywhere() {
    const resume_from = {
      request_id: this.#accepted.request_id,
      places: this.#received.places,
    };
    this.#submit({ ...this.#request, resume_from });
  }

  #onNoResponders() {
    const error = failure("unavailable", "no gateway serves this model");
    if (this.#lostSince !== null) {
      this.#onRejection(error);
      return;
    }
    this.#silentSince ??= Date.now();
    const first = this.#accepted === null && this.#submitted === 1;
    if (first || Date.now() - this.#silentSince >= NO_RESPONDERS_MS) throw error;
  }

  #onRejection(error) {
    if (this.#accepted === null) throw error;
    if (this.#lostSince === null) return; // of a retry, after another one was accepted
    const window = Math.max(1000 * this.#request.resume_s, NO_RESPONDERS_MS);
    const over = Date.now() - this.#lostSince >= window;
    if (over || !TRANSIENT.includes(error.code)) throw error;
  }

  async #cancel(accepted) {
    await this.#control(accepted, { type: "GenerateCancel", request_id: accepted.request_id });
  }

  #control({ gateway }, message) {
    const subject = `${this.#client.prefix}.gateway.${escapeName(gateway)}.control`;
    return this.#client.call(subject, message);
  }
}

/** Accepts pieces in any order, with repeats, and returns each byte once and in order. */
class Assembler {
  #text = new Map(); // bytes, by choice
  #tokens = new Map(); // offset of the next token
  #first;

  constructor(first) {
    this.#first = first;
  }

  get places() {
    return [...this.#text].map(([choice, text_offset]) => ({
      choice,
      text_offset,
      token_offset: this.#tokens.get(choice) ?? this.#first,
    }));
  }

  has(choice, textBytes, detailsEnd) {
    const tokens = this.#tokens.get(choice) ?? this.#first;
    return (this.#text.get(choice) ?? 0) >= textBytes && tokens >= detailsEnd;
  }

  /** Return the new part of a piece; null if something is missing before it. */
  add(piece) {
    const { choice, text_offset } = piece;
    const have = this.#text.get(choice) ?? 0;
    const next = this.#tokens.get(choice) ?? this.#first;
    if (text_offset > have || (piece.details && piece.details.offset > next)) return null;
    const rest = Buffer.from(piece.text).subarray(have - text_offset);
    this.#text.set(choice, have + rest.length);
    const details = piece.details ? detailsFrom(parseDetails(piece.details), next) : null;
    if (details) this.#tokens.set(choice, details.offset + details.count);
    return { choice, text: rest.toString(), details };
  }
}

const COLUMNS = {
  token_ids: Int32Array,
  logprobs: Float32Array,
  top_ids: Int32Array,
  top_logprobs: Float32Array,
  named_logprobs: Float32Array,
  hidden: Float32Array,
};

/** Details per token: `offset` of the first, `count`, a typed array for each column, `texts`. */
function parseDetails({ offset, details, texts, written }) {
  const parsed = { offset, count: details.count ?? 0, texts: texts ?? {}, written: written ?? {} };
  for (const [name, Numbers] of Object.entries(COLUMNS)) {
    parsed[name] = new Numbers(Uint8Array.from(bytes(details[name] ?? "")).buffer);
  }
  for (const [id, text] of Object.entries(parsed.written)) parsed.written[id] = bytes(text);
  return parsed;
}

/** The details from a token offset on; null if there are none. */
function detailsFrom(details, offset) {
  const skipped = Math.max(0, offset - details.offset);
  if (skipped >= details.count) return null;
  const rest = { ...details, offset: details.offset + skipped, count: details.count - skipped };
  for (const name of Object.keys(COLUMNS)) {
    rest[name] = details[name].subarray((details[name].length / details.count) * skipped);
  }
  return rest;
}

/** Binary data: bytes in MessagePack, base64 in JSON. */
function bytes(data) {
  return typeof data === "string" ? Buffer.from(data, "base64") : data;
}

/** A name as one token of a subject. */
function escapeName(name) {
  const hex = (byte) => `=${byte.toString(16).toUpperCase().padStart(2, "0")}`;
  const escaped = (characters) => [...Buffer.from(characters)].map(hex).join("");
  return name.replace(/[^A-Za-z0-9_-]/gu, escaped);
}

function failure(code, message) {
  return new AntiphonError({ code, message });
}
