/** What pit-deploy asks of a bundle in onnxruntime-web, the same in Node and in a page. */

import { Decoder, openSession, runOnce } from "./decoder.mjs";
import { checkedFile } from "./manifest.mjs";

/** `load(path)` gives the bytes of a file of the bundle; `probe()` those of a graph with more outputs. */
export class Actions {
  constructor(ort, load, probe) {
    Object.assign(this, { ort, load, probe, probeSession: null });
  }

  /** Check and open the bundle. `weights` has the paths of the files that the graph names, relative to it. */
  async open({ manifest, weights }) {
    Object.assign(this, { manifest, weights });
    const model = await checkedFile(manifest, manifest.model_file, this.load);
    this.decoder = new Decoder(this.ort, await this.#session(model), manifest);
    return {};
  }

  async prefill({ ids }) {
    const logits = await this.decoder.prefill(ids);
    return { logits: { data: logits, shape: [logits.length] } };
  }

  async reset() {
    this.decoder.reset();
    return {};
  }

  /** `outputs` of the graph that `probe` gives, for `ids` from an empty cache. */
  async inspect({ ids, outputs }) {
    this.probeSession ??= await this.#session(await this.probe());
    return runOnce(this.ort, this.probeSession, this.manifest.states, ids, outputs);
  }

  /** The weights are read anew for each session and let go of: they are in the session's own memory then. */
  async #session(model) {
    const folder = this.manifest.model_file.split("/").slice(0, -1);
    const found = [];
    for (const path of this.weights) {
      found.push({ path, data: await checkedFile(this.manifest, [...folder, path].join("/"), this.load) });
    }
    return openSession(this.ort, model, found);
  }
}
