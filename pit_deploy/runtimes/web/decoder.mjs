/** A bundle in onnxruntime-web: one session, one sequence. Node and browsers. */

/** Raised before anything runs where tokens do not fit into the cache. */
export class ContextFullError extends Error {
  constructor(used, needed, contextLength) {
    super(
      `The context is full: ${used} tokens are in the cache and ${needed} more were asked for, but the artifact ` +
        `holds ${contextLength}; shorten the prompt or start anew.`,
    );
    this.name = "ContextFullError";
  }
}

/**
 * A session on a graph, with the files that hold its weights under the names that the graph knows.
 *
 * `model` is a Uint8Array, `weights` a list of `{ path, data }`.
 */
export async function openSession(ort, model, weights) {
  return ort.InferenceSession.create(model, {
    executionProviders: ["wasm"],
    externalData: weights,
    logSeverityLevel: 3,
  });
}

/** One sequence in the cache of a session. */
export class Decoder {
  constructor(ort, session, manifest) {
    this.ort = ort;
    this.session = session;
    this.contextLength = manifest.context_length;
    this.states = manifest.states;
    this.reset();
  }

  /** Empty the cache. */
  reset() {
    this.position = 0;
    this.past = emptyStates(this.ort, this.states);
  }

  /** Append `ids` (at least one) in one pass and return the logits of the last position, Float32Array [vocab_size]. */
  async prefill(ids) {
    if (ids.length === 0) throw new Error("The prompt has no tokens; give at least one.");
    const total = this.position + ids.length;
    if (total > this.contextLength) throw new ContextFullError(this.position, ids.length, this.contextLength);
    const results = await this.session.run({ ...tokenInputs(this.ort, ids, total), ...this.past });
    this.past = Object.fromEntries(this.states.map((state) => [state.name, results[state.output]]));
    this.position = total;
    const width = results.logits.dims[2];
    return results.logits.data.subarray(results.logits.data.length - width);
  }
}

/** `outputs` of a graph for `ids` from an empty cache, each `{ data, shape }` without the batch dimension. */
export async function runOnce(ort, session, states, ids, outputs) {
  const results = await session.run({ ...tokenInputs(ort, ids, ids.length), ...emptyStates(ort, states) }, outputs);
  return Object.fromEntries(
    outputs.map((name) => [name, { data: results[name].data, shape: results[name].dims.slice(1) }]),
  );
}

function tokenInputs(ort, ids, total) {
  return {
    input_ids: new ort.Tensor("int64", BigInt64Array.from(ids, BigInt), [1, ids.length]),
    attention_mask: new ort.Tensor("int64", new BigInt64Array(total).fill(1n), [1, total]),
  };
}

/** Keys and values of no tokens, [1, heads, 0, head_dim]. */
function emptyStates(ort, states) {
  return Object.fromEntries(
    states.map(({ name, shape }) => [name, new ort.Tensor("float32", new Float32Array(0), [1, shape[1], 0, shape[3]])]),
  );
}
