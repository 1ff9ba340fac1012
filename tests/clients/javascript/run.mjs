// Runs requests for the tests, all at once: those of a file, one a line. Writes a line of JSON for
// each piece of their output, their end, and their error.
//
//     node run.mjs '{"servers": "nats://...", "format": "json"}' requests.jsonl
//     {"name": "a", "request": {...}, "leave_after": 3}
//     {"name": "b", "request": {...}, "complete": true}

import { readFileSync } from "node:fs";
import { Client } from "./antiphon.mjs";

const client = await Client.connect(JSON.parse(process.argv[2]));
const write = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);

async function run({ name, request, leave_after, complete }) {
  try {
    if (complete) {
      write({ name, whole: plain(await client.complete(request)) });
      return;
    }
    const stream = client.generate(request);
    let count = 0;
    for await (const chunk of stream) {
      write({ name, chunk: plain(chunk) });
      count += 1;
      if (count === leave_after) break;
    }
    write({ name, end: plain(stream.end), left: stream.end === null });
  } catch (error) {
    write({ name, error: { code: error.code ?? null, message: error.message } });
  }
}

/** The same with arrays of numbers and texts in place of typed arrays and bytes. */
function plain(value) {
  if (Buffer.isBuffer(value) || value instanceof Uint8Array) return Buffer.from(value).toString("hex");
  if (ArrayBuffer.isView(value)) return [...value];
  if (Array.isArray(value)) return value.map(plain);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, plain(each)]));
}

const lines = readFileSync(process.argv[3], "utf8").split("\n").filter(Boolean);
await Promise.all(lines.map((line) => run(JSON.parse(line))));
await client.close();
