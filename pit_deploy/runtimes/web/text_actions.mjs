/** What pit-deploy asks of transformers.js in a page: the greedy text of a bundle's web view. */

export class TextActions {
  /**
   * Open the web view that is served as /models/bundle/; nothing is fetched from elsewhere.
   *
   * Throws where the tokenizer makes other ids of the manifest's check texts.
   */
  async open({ manifest, threads }) {
    const { AutoModelForCausalLM, AutoTokenizer, env } = await import("/transformers/transformers.min.js");
    env.allowRemoteModels = false;
    env.allowLocalModels = true;
    env.localModelPath = "/models/";
    env.useBrowserCache = false;
    // The build that transformers.js takes by itself lacks GatherBlockQuantized on the CPU; this one has it.
    env.backends.onnx.wasm.wasmPaths = {
      mjs: "/transformers-ort/ort-wasm-simd-threaded.mjs",
      wasm: "/transformers-ort/ort-wasm-simd-threaded.wasm",
    };
    env.backends.onnx.wasm.numThreads = threads;
    this.tokenizer = await AutoTokenizer.from_pretrained("bundle");
    checkTokenizer(this.tokenizer, manifest.tokenizer_checks);
    this.model = await AutoModelForCausalLM.from_pretrained("bundle", { device: "wasm" });
    return { threads: crossOriginIsolated ? threads : 1, version: env.version };
  }

  async generate({ prompt, max_new_tokens: maxNewTokens }) {
    const inputs = this.tokenizer(prompt);
    const output = await this.model.generate({
      ...inputs,
      max_new_tokens: maxNewTokens,
      do_sample: false,
      repetition_penalty: 1,
    });
    const ids = output.tolist()[0].slice(inputs.input_ids.dims[1]).map(Number);
    const options = { skip_special_tokens: true, clean_up_tokenization_spaces: false };
    return { text: this.tokenizer.decode(ids, options), ids };
  }
}

function checkTokenizer(tokenizer, checks) {
  for (const { text, ids } of checks) {
    const found = tokenizer.encode(text, { add_special_tokens: false });
    if (JSON.stringify(found) !== JSON.stringify(ids)) {
      throw new Error(
        `its tokenizer makes ${found.slice(0, 8)} of ${JSON.stringify(text)}, and the model's own ${ids.slice(0, 8)}`,
      );
    }
  }
}
