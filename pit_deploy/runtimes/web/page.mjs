/** The page that page_host.mjs opens: it runs the bundle in this browser and posts what comes out. */

import { Actions } from "./actions.mjs";
import { TextActions } from "./text_actions.mjs";

let actions = null;

const load = async (path) => {
  const response = await fetch("/bundle/" + path.split("/").map(encodeURIComponent).join("/"));
  if (!response.ok) return null;
  return new Uint8Array(await response.arrayBuffer());
};

async function open(head) {
  if (head.runtime === "transformers.js") {
    actions = new TextActions();
    return actions.open(head);
  }
  const ort = await import("/ort/ort.wasm.min.mjs");
  ort.env.wasm.wasmPaths = "/ort/";
  ort.env.wasm.numThreads = head.threads;
  const probe = async () => new Uint8Array(await (await fetch("/memory/probe")).arrayBuffer());
  actions = new Actions(ort, load, probe);
  await actions.open(head);
  return { threads: crossOriginIsolated ? head.threads : 1, version: ort.env.versions.web };
}

/** Answer one call. Arrays are too large for the channel that returns values, so they are posted, one after another. */
globalThis.answer = async (head) => {
  try {
    if (head.do === "open") return { facts: await open(head), described: {} };
    const { text, ids, ...arrays } = await actions[head.do](head);
    const described = Object.fromEntries(Object.entries(arrays).map(([name, { shape }]) => [name, shape]));
    const body = new Blob(Object.values(arrays).map(({ data }) => data));
    if (body.size > 0) await fetch("/answer", { method: "POST", body });
    return { text, ids, described };
  } catch (error) {
    return { error: String(error?.message ?? error) };
  }
};
globalThis.ready = true;
