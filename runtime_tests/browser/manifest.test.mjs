/** Manifests, good and bad, that readers in all languages share. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { BundleError, checkedFile, parseManifest } from "../../pit_deploy/runtimes/web/manifest.mjs";

const folder = new URL("../vectors/manifests/", import.meta.url);
const { cases } = JSON.parse(readFileSync(new URL("index.json", folder), "utf8"));

/** Faults in fields that this client does not use; Python's reader finds them. */
const UNUSED = ["bad_unknown_field", "bad_precision", "bad_boolean", "bad_hidden_states"];
/** A page fetches files by name and meets no links. */
const isLink = ({ files }) => files.some((file) => "link" in file);

test("manifests", async () => {
  const read = cases.filter((one) => !UNUSED.includes(one.name) && !isLink(one));
  assert.ok(read.length >= cases.length - UNUSED.length - 4);
  for (const { name, manifest: file, expect, check_hashes: hashes, files } of read) {
    const contents = Object.fromEntries(files.map(({ path, text }) => [path, new TextEncoder().encode(text)]));
    let found = "ok";
    try {
      const manifest = parseManifest(readFileSync(new URL(file, folder), "utf8"));
      for (const { path } of manifest.files) {
        await checkedFile(manifest, path, async () => contents[path] ?? null, { hashes });
      }
    } catch (error) {
      assert.ok(error instanceof BundleError, `${name}: ${error}`);
      found = error.kind;
    }
    assert.equal(found, expect, name);
  }
});

test("a newer version is refused with both numbers", () => {
  const text = JSON.stringify({ format: "pit-deploy bundle", format_version: 7 });
  assert.throws(() => parseManifest(text), { kind: "newer_version", message: /version 7, .* reads 1; use a newer/ });
});
