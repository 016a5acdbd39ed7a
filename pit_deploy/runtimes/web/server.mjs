/** A server on this machine alone, with the headers that a page needs for threads in WebAssembly. */

import { createReadStream } from "node:fs";
import { stat } from "node:fs/promises";
import { createServer } from "node:http";
import { extname, join, normalize, sep } from "node:path";

const TYPES = {
  ".html": "text/html; charset=utf-8",
  ".mjs": "text/javascript",
  ".js": "text/javascript",
  ".json": "application/json",
  ".wasm": "application/wasm",
};
const TYPE = "application/octet-stream";
// Without these two a page is not isolated, has no SharedArrayBuffer, and WebAssembly runs on one thread.
const ISOLATION = { "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp" };

/**
 * Serve `folders` (URL prefix to folder) on a free port of 127.0.0.1.
 *
 * `onPost(path, bytes)` is called for what a page sends; `memory(path)` may give `{ data, type }` for a path
 * that is no file.
 */
export async function serve(folders, { onPost = () => {}, memory = () => null } = {}) {
  const server = createServer(async (request, response) => {
    try {
      const path = decodeURIComponent(new URL(request.url, "http://localhost").pathname);
      if (request.method === "POST") {
        const chunks = [];
        for await (const chunk of request) chunks.push(chunk);
        onPost(path, Buffer.concat(chunks));
        response.writeHead(204, ISOLATION).end();
        return;
      }
      const held = memory(path);
      if (held !== null) {
        const type = held.type ?? TYPE;
        response.writeHead(200, { ...ISOLATION, "Content-Type": type, "Content-Length": held.data.length });
        response.end(held.data);
        return;
      }
      const file = locate(folders, path);
      const { size } = await stat(file);
      const type = TYPES[extname(file)] ?? TYPE;
      response.writeHead(200, { ...ISOLATION, "Content-Type": type, "Content-Length": size });
      if (request.method === "HEAD") response.end();
      else createReadStream(file).pipe(response);
    } catch {
      response.writeHead(404, ISOLATION).end();
    }
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return { server, origin: `http://127.0.0.1:${server.address().port}` };
}

/** The file for a path of a URL. Throws where no folder is served there, or the path leaves it. */
export function locate(folders, path) {
  const prefix = Object.keys(folders).find((start) => path.startsWith(start));
  if (prefix === undefined) throw new Error(`${path} is not served`);
  const file = normalize(join(folders[prefix], path.slice(prefix.length)));
  if (!file.startsWith(normalize(folders[prefix] + sep))) throw new Error(`${path} leaves its folder`);
  return file;
}
