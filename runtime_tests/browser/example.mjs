/**
 * Run the two examples of docs/browser.md in a page and print what they give as JSON.
 *
 * node example.mjs MODULES CHROMIUM BUNDLE VIEW PROMPT PROMPT_IDS
 */

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { serve } from "../../pit_deploy/runtimes/web/server.mjs";

const [modules, executablePath, bundle, view, prompt, promptIds] = process.argv.slice(2);
const require = createRequire(join(modules, "package.json"));
const transformers = require.resolve("@huggingface/transformers");
const here = dirname(fileURLToPath(import.meta.url));

const document = readFileSync(join(here, "..", "..", "docs", "browser.md"), "utf8");
const [own, theirs] = [...document.matchAll(/```js\n(.*?)```/gs)].map((match) => match[1]);
const imports = { "@huggingface/transformers": "/transformers/transformers.min.js" };
const pages = {
  "/own": own + "\nglobalThis.result = { ids, finishReason };",
  "/theirs": theirs + "\nglobalThis.result = { text };",
};

function page(script) {
  return Buffer.from(`<!doctype html><script type="importmap">${JSON.stringify({ imports })}</script>
<script>var promptIds = ${promptIds}, prompt = ${JSON.stringify(prompt)}, show = () => true;</script>
<script type="module">${script}</script>`);
}

const results = {};
for (const [path, script] of Object.entries(pages)) {
  const ort =
    path === "/own" ? require.resolve("onnxruntime-web") : createRequire(transformers).resolve("onnxruntime-web");
  const folders = {
    "/web/": join(here, "..", "..", "pit_deploy", "runtimes", "web"),
    "/ort/": dirname(ort),
    "/transformers/": dirname(transformers),
    "/bundle/": bundle,
    "/models/my-model/": view,
  };
  const { server, origin } = await serve(folders, {
    memory: (asked) => (asked === path ? { data: page(script), type: "text/html" } : null),
  });
  const args = process.getuid?.() === 0 ? ["--no-sandbox"] : [];
  const browser = await require("playwright-core").chromium.launch({ executablePath, args });
  const tab = await browser.newPage();
  tab.on("pageerror", (error) => {
    console.error(`${path}: ${error.message}`);
    process.exit(1);
  });
  await tab.goto(origin + path);
  await tab.waitForFunction(() => globalThis.result !== undefined, undefined, { timeout: 60_000 });
  results[path.slice(1)] = await tab.evaluate(() => globalThis.result);
  await browser.close();
  server.close();
}
console.log(JSON.stringify(results));
