/** A page in headless Chromium that runs the bundle, and the server that gives it the files. */

import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { serve } from "./server.mjs";

const OPEN_MS = 900_000;

export async function openHost(head) {
  const { modules, bundle, chromium: executablePath } = head;
  const require = createRequire(join(modules, "package.json"));
  const transformers = require.resolve("@huggingface/transformers");
  let posted = null;
  let probe = null;
  const { server, origin } = await serve(
    {
      "/web/": dirname(fileURLToPath(import.meta.url)),
      "/ort/": dirname(require.resolve("onnxruntime-web")),
      "/transformers/": dirname(transformers),
      "/transformers-ort/": dirname(createRequire(transformers).resolve("onnxruntime-web")),
      "/bundle/": bundle,
      "/models/bundle/": bundle,
    },
    {
      onPost: (path, bytes) => (posted = path === "/answer" ? bytes : posted),
      memory: (path) => (path === "/memory/probe" ? { data: probe } : null),
    },
  );
  const browser = await require("playwright-core").chromium.launch({
    executablePath,
    // Chromium's sandbox refuses to start as root, which is what a container usually is.
    args: process.getuid?.() === 0 ? ["--no-sandbox"] : [],
  });
  const page = await browser.newPage();
  page.setDefaultTimeout(OPEN_MS);
  page.on("console", (message) => console.error(message.text()));
  page.on("pageerror", (error) => console.error(error.message));
  // A tab that runs out of memory would otherwise be waited for in vain; the parent reports the exit.
  page.on("crash", () => {
    console.error("the tab crashed, probably for want of memory");
    process.exit(3);
  });
  await page.goto(`${origin}/web/page.html`);
  await page.waitForFunction(() => globalThis.ready === true);

  async function call(message) {
    posted = null;
    const { error, facts, text, ids, described } = await page.evaluate((m) => globalThis.answer(m), message);
    if (error !== undefined) throw new Error(error);
    return { facts, text, ids, arrays: unpack(posted, described) };
  }

  const { facts } = await call({ ...head, do: "open" });
  return {
    facts: { ...facts, browser: browser.version() },
    async call(message, arrays) {
      if (arrays.graph !== undefined) probe = Buffer.from(arrays.graph.data);
      return call(message);
    },
    async close() {
      await browser.close();
      server.close();
    },
  };
}

/** The float32 arrays that a page posted, by name, from their shapes in the same order. */
function unpack(bytes, described) {
  const arrays = {};
  let offset = 0;
  for (const [name, shape] of Object.entries(described ?? {})) {
    const length = 4 * shape.reduce((product, n) => product * n, 1);
    arrays[name] = { data: bytes.subarray(offset, offset + length), shape };
    offset += length;
  }
  return arrays;
}
