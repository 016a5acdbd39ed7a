/** Reading manifest.json: whose it is, its version, and the fields that a client in JavaScript relies on. */

const FORMAT = "pit-deploy bundle";
const VERSION = 1;
const AGAIN = "export the bundle again, or fetch it again from where it came.";

/** A bundle that is not opened; `kind` is the word of docs/bundle.md, the same in every language. */
export class BundleError extends Error {
  constructor(kind, message) {
    super(message);
    this.name = "BundleError";
    this.kind = kind;
  }
}

/**
 * The manifest as an object. Throws `BundleError` where it is of another program or version, and where a field that
 * this client uses is missing or makes no sense. The Python reader checks every field; this one trusts the others.
 */
export function parseManifest(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new BundleError("bad_json", `manifest.json is not JSON: ${error.message}.`);
  }
  if (value?.format !== FORMAT) {
    throw new BundleError("not_a_bundle", `The field format of manifest.json is not '${FORMAT}'.`);
  }
  const { format_version: version } = value;
  if (!Number.isInteger(version)) throw new BundleError("bad_value", `format_version is ${version}, no whole number.`);
  if (version !== VERSION) {
    const advice = version > VERSION ? "use a newer pit-deploy" : "export the bundle again";
    throw new BundleError(
      version > VERSION ? "newer_version" : "older_version",
      `The bundle has format version ${version}, and this program reads ${VERSION}; ${advice}.`,
    );
  }
  check(value);
  return value;
}

function check(manifest) {
  const whole = ["context_length", "vocab_size", "tokenizer_length"];
  for (const name of [...whole, "runtime", "model_file", "end_ids", "states", "files", "bos_id", "tokenizer_checks"]) {
    if (!(name in manifest)) throw new BundleError("missing_field", `manifest.json has no field ${name}.`);
  }
  for (const name of whole) {
    if (!Number.isInteger(manifest[name]) || manifest[name] < 1) {
      throw new BundleError("bad_value", `The field ${name} is ${JSON.stringify(manifest[name])}, no number above 0.`);
    }
  }
  const { end_ids: ends, tokenizer_length: length, vocab_size: rows, files, model_file: model } = manifest;
  if (!Array.isArray(ends) || ends.length === 0 || !ends.every(Number.isInteger)) {
    throw new BundleError("bad_value", `The field end_ids is ${JSON.stringify(ends)}, no list of ids.`);
  }
  if (!Array.isArray(files)) throw new BundleError("bad_value", "The field files is no list.");
  for (const path of [model, ...files.map((file) => file?.path)]) checkPath(path);
  for (const { path, size, sha256 } of files) {
    if (!Number.isSafeInteger(size) || size < 0 || !/^[0-9a-f]{64}$/.test(sha256)) {
      throw new BundleError("bad_value", `The size or the SHA-256 of ${path} in manifest.json is none.`);
    }
  }
  if (new Set(files.map(({ path }) => path)).size !== files.length) {
    throw new BundleError("bad_value", "The field files of manifest.json names a file twice.");
  }
  if (length > rows) {
    throw new BundleError("bad_vocabulary", `tokenizer_length is ${length} and vocab_size only ${rows}.`);
  }
  const wrong = ends.find((id) => id < 0 || id >= length);
  if (wrong !== undefined)
    throw new BundleError("bad_end_id", `The end id ${wrong} is past the tokenizer's ${length}.`);
  const { bos_id: first } = manifest;
  if (first !== null && !(Number.isInteger(first) && first >= 0 && first < length)) {
    throw new BundleError("bad_token_id", `The field bos_id is ${first}, past the tokenizer's ${length}.`);
  }
  if (!files.some(({ path }) => path === model || path.startsWith(model + "/"))) {
    throw new BundleError("unlisted_file", `The manifest does not list its model file ${model}.`);
  }
}

/** A path stays inside the bundle: parts between single slashes, none of them a dot or two. */
function checkPath(path) {
  if (typeof path !== "string") throw new BundleError("bad_value", `A path is ${JSON.stringify(path)}, no text.`);
  const inside = path.split("/").every((part) => part !== "" && part !== "." && part !== "..");
  if (!inside || /[\\:\u0000-\u001f\u007f]/.test(path)) {
    throw new BundleError("path_escape", `The path ${JSON.stringify(path)} leads out of the bundle.`);
  }
}

/**
 * Fetch a file of a bundle and check it. `load(path)` gives its bytes, or null where there is none.
 *
 * Throws `BundleError` where the manifest does not list it, it is missing, or its size or (with `hashes`) SHA-256 is
 * another.
 */
export async function checkedFile(manifest, path, load, { hashes = true } = {}) {
  const entry = manifest.files.find((file) => file.path === path);
  if (entry === undefined) throw new BundleError("unlisted_file", `The manifest does not list ${path}; ${AGAIN}`);
  const bytes = await load(path);
  if (bytes === null) throw new BundleError("missing_file", `${path} is missing, and the manifest lists it; ${AGAIN}`);
  if (bytes.length !== entry.size) {
    const message = `${path} has ${bytes.length} bytes, and the manifest says ${entry.size}; ${AGAIN}`;
    throw new BundleError("wrong_size", message);
  }
  if (!hashes) return bytes;
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  const found = Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
  if (found !== entry.sha256) {
    throw new BundleError(
      "wrong_hash",
      `${path} has changed: its SHA-256 starts with ${found.slice(0, 12)} and the manifest says ` +
        `${entry.sha256.slice(0, 12)}; ${AGAIN}`,
    );
  }
  return bytes;
}
