/** onnxruntime-web in Node: WebAssembly on one thread. */

import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { join } from "node:path";

import { Actions } from "./actions.mjs";

export async function openHost({ modules, bundle, manifest, weights }) {
  const ort = createRequire(join(modules, "package.json"))("onnxruntime-web");
  ort.env.wasm.numThreads = 1;
  let probe = null;
  const load = async (path) => new Uint8Array(await readFile(join(bundle, ...path.split("/"))));
  const actions = new Actions(ort, load, async () => probe);
  await actions.open({ manifest, weights });
  return {
    facts: { threads: 1, version: ort.env.versions.web },
    async call(head, arrays) {
      probe = arrays.graph?.data ?? probe;
      return { arrays: await actions[head.do](head) };
    },
    async close() {},
  };
}
