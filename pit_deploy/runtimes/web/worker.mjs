/**
 * The child process of the runtimes onnxruntime-web, chromium and transformers.js: it answers calls over standard
 * input and output. The first message says which one, and where the bundle and the packages are.
 */

import { messages, send } from "./messages.mjs";

const HOSTS = {
  "onnxruntime-web": "./node_host.mjs",
  chromium: "./page_host.mjs",
  "transformers.js": "./page_host.mjs",
};

// What libraries print must not get between the messages.
for (const name of ["log", "info", "warn", "debug"]) console[name] = console.error;

let host = null;
for await (const { head, arrays } of messages(process.stdin)) {
  try {
    if (host === null) {
      const { openHost } = await import(HOSTS[head.runtime]);
      host = await openHost(head);
      send(process.stdout, { ok: true, ...host.facts });
    } else {
      const { text, ids, arrays: found } = await host.call(head, arrays);
      send(process.stdout, { ok: true, text, ids }, found);
    }
  } catch (error) {
    send(process.stdout, { ok: false, error: String(error?.message ?? error) });
    if (host === null) break;
  }
}
await host?.close();
process.exit(0);
