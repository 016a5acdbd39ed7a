/** The JavaScript sampler and generation loop against the vectors that all languages share. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { generate } from "../../pit_deploy/runtimes/web/generate.mjs";
import { philox4x32, probabilities, sample, uniform } from "../../pit_deploy/runtimes/web/sampling.mjs";

function load(name) {
  const document = JSON.parse(readFileSync(new URL(`../vectors/${name}`, import.meta.url), "utf8"));
  assert.equal(document.format, 1);
  return document;
}

const optionsOf = (given) => ({ ...given, seed: BigInt(given.seed) });

test("random numbers", () => {
  const { philox, uniform: numbers } = load("philox.json");
  for (const { counter, key, expected } of philox) assert.deepEqual(philox4x32(counter, key), expected);
  for (const { seed, step, expected } of numbers) assert.equal(uniform(BigInt(seed), BigInt(step)), expected);
});

test("sampling", () => {
  const { cases, errors } = load("sampling.json");
  assert.ok(cases.length >= 60);
  for (const { name, logits, options, step, previous_ids: previous, expected } of cases) {
    const values = logits.map(Number);
    const found = probabilities(values, optionsOf(options), previous);
    assert.deepEqual(found.ids, expected.ids, name);
    found.probabilities.forEach((p, n) => assert.ok(Math.abs(p - expected.probabilities[n]) <= 1e-9, name));
    assert.equal(sample(values, optionsOf(options), BigInt(step), previous), expected.drawn, name);
  }
  for (const { name, logits } of errors) {
    for (const temperature of [0, 1])
      assert.throws(() => sample(logits.map(Number), { temperature }, 0), RangeError, name);
  }
});

test("options outside their range are errors that name them", () => {
  const wrong = { temperature: -1, top_k: 1.5, top_p: 1.1, min_p: NaN, repetition_penalty: 0, seed: 2 ** 60 };
  for (const [name, value] of Object.entries(wrong)) {
    assert.throws(() => sample([0, 1], { [name]: value }, 0), {
      name: "RangeError",
      message: new RegExp(`^${name} must`),
    });
  }
});

test("stop rules", async () => {
  for (const given of load("stop.json").loops) {
    const decoder = new DrawingDecoder(given);
    const given_out = [];
    const run = generate(decoder, new Array(given.prompt_tokens).fill(0), {
      maxNewTokens: given.max_new_tokens,
      stopIds: given.stop_ids,
      cancelled: given.cancel_after === 0,
      onToken: (id) => given_out.push(id) !== given.cancel_after,
    });
    const { expected, name } = given;
    if ("error" in expected) {
      await assert.rejects(run, { name: expected.error === "context_full" ? "ContextFullError" : "RangeError" }, name);
      assert.equal(decoder.runs, 0, name);
      continue;
    }
    const found = await run;
    assert.deepEqual(given_out, expected.ids, name);
    assert.deepEqual({ ...summary(found), runs: decoder.runs, position: decoder.position }, { ...expected }, name);
  }
});

test("whole generations with recorded logits", async () => {
  const { cases } = load("generation.json");
  assert.ok(cases.length >= 5);
  for (const given of cases) {
    const decoder = new RecordedDecoder(given);
    const history = [];
    for (const { prompt_ids: prompt, expected } of given.turns) {
      const found = await generate(decoder, prompt, {
        maxNewTokens: given.max_new_tokens,
        stopIds: given.stop_ids,
        options: optionsOf(given.options),
        history,
      });
      // The pieces of text are the business of a tokenizer, which this loop has not.
      const { pieces, ...rest } = expected;
      assert.deepEqual({ ...summary(found), position: decoder.position }, rest, given.name);
      history.push(...prompt, ...found.ids);
    }
  }
});

function summary({ ids, finishReason, stopId, pendingIds }) {
  return { ids, finish_reason: finishReason, stop_id: stopId, pending_ids: pendingIds };
}

/** Logits whose largest is at the next of `draws`. */
class DrawingDecoder {
  constructor({ context_length: contextLength, position, draws }) {
    Object.assign(this, { contextLength, position, draws, runs: 0 });
  }

  async prefill(ids) {
    const logits = new Float32Array(32);
    logits[this.draws[this.runs++]] = 1;
    this.position += ids.length;
    return logits;
  }
}

/** Logits that were recorded for the very ids that are in the cache and are run. */
class RecordedDecoder {
  constructor({ context_length: contextLength, runs }) {
    Object.assign(this, { contextLength, cached: [] });
    this.runs = new Map(runs.map((run) => [JSON.stringify([run.cached, run.new]), run.logits]));
  }

  get position() {
    return this.cached.length;
  }

  async prefill(ids) {
    const recorded = this.runs.get(JSON.stringify([this.cached, [...ids]]));
    assert.ok(recorded !== undefined, `no run was recorded for ${ids} after ${this.cached}`);
    this.cached.push(...ids);
    return new Float32Array(new Uint8Array(Buffer.from(recorded, "base64")).buffer);
  }
}
