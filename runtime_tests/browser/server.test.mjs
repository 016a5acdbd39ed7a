/** The local server: headers for threads, and nothing outside the folders that it serves. */

import assert from "node:assert/strict";
import { mkdtempSync, mkdirSync, writeFileSync } from "node:fs";
import { request } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import { locate, serve } from "../../pit_deploy/runtimes/web/server.mjs";

const folder = mkdtempSync(join(tmpdir(), "pit-deploy-server-"));
mkdirSync(join(folder, "open"));
writeFileSync(join(folder, "open", "model.onnx"), "graph");
writeFileSync(join(folder, "secret"), "secret");

/** As it is written: fetch would resolve the dots before it asks. */
function get(origin, path) {
  return new Promise((resolve, reject) => {
    const { hostname, port } = new URL(origin);
    request({ hostname, port, path }, (response) => {
      const chunks = [];
      response.on("data", (chunk) => chunks.push(chunk));
      response.on("end", () => {
        resolve({ status: response.statusCode, headers: response.headers, text: Buffer.concat(chunks).toString() });
      });
    })
      .on("error", reject)
      .end();
  });
}

test("files are served with the headers that isolate a page", async (t) => {
  const { server, origin } = await serve({ "/bundle/": join(folder, "open") });
  t.after(() => server.close());
  const found = await get(origin, "/bundle/model.onnx");
  assert.equal(found.text, "graph");
  assert.equal(found.headers["cross-origin-opener-policy"], "same-origin");
  assert.equal(found.headers["cross-origin-embedder-policy"], "require-corp");
  assert.equal(found.headers["content-length"], "5");
  assert.equal(server.address().address, "127.0.0.1");
});

test("nothing outside the folders is served", async (t) => {
  const { server, origin } = await serve({ "/bundle/": join(folder, "open") });
  t.after(() => server.close());
  for (const path of [
    "/bundle/../secret",
    "/bundle/%2e%2e/secret",
    "/bundle/..%2fsecret",
    "/secret",
    "/bundle/none",
    "/bundle/",
    "/%",
  ]) {
    const found = await get(origin, path);
    assert.equal(found.status, 404, path);
    assert.equal(found.text, "", path);
  }
  assert.throws(() => locate({ "/a/": "/x" }, "/a/../y"), /leaves its folder/);
});
