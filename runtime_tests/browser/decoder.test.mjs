/** What a page checks before onnxruntime-web sees a byte, and before a token runs. */

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { test } from "node:test";

import { Decoder } from "../../pit_deploy/runtimes/web/decoder.mjs";
import { checkedFile } from "../../pit_deploy/runtimes/web/manifest.mjs";

const weights = new Uint8Array(4096).map((_, n) => n % 251);
const sha256 = createHash("sha256").update(weights).digest("hex");
const manifest = { files: [{ path: "model.onnx_data", size: weights.length, sha256 }] };

test("a whole file is given back", async () => {
  assert.equal(await checkedFile(manifest, "model.onnx_data", async () => weights), weights);
});

test("a weight file cut by one byte is refused with both numbers", async () => {
  const load = async () => weights.subarray(0, 4095);
  await assert.rejects(checkedFile(manifest, "model.onnx_data", load), /model.onnx_data has 4095 bytes.*says 4096/);
});

test("a changed byte is refused", async () => {
  const load = async () => weights.map((byte, n) => (n === 7 ? byte ^ 1 : byte));
  await assert.rejects(checkedFile(manifest, "model.onnx_data", load), /has changed: its SHA-256 starts with/);
});

test("a file that the manifest lacks is not loaded", async () => {
  const load = async () => assert.fail("it was loaded");
  await assert.rejects(checkedFile(manifest, "other", load), /does not list other/);
});

test("a full context is an error before anything runs", async () => {
  const session = { run: () => assert.fail("it ran") };
  class Tensor {}
  const states = [{ name: "past_key_values.0.key", output: "present.0.key", shape: ["batch_size", 2, "past", 8] }];
  const decoder = new Decoder({ Tensor }, session, { context_length: 16, states });
  await assert.rejects(decoder.prefill(new Array(20).fill(1)), {
    name: "ContextFullError",
    message: /20 more.*holds 16/,
  });
  await assert.rejects(decoder.prefill([]), /no tokens/);
  assert.equal(decoder.position, 0);
});
