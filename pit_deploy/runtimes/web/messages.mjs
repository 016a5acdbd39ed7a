/**
 * Messages between pit-deploy and this process: one line of JSON, then the bytes of the arrays that it describes.
 * `pit_deploy/runtimes/messages.py` is the other side.
 */

const KINDS = {
  "<f4": Float32Array,
  "<i4": Int32Array,
  "|u1": Uint8Array,
};

/** Read messages from a stream until it ends, each as `{ head, arrays }`; an array has `data` and `shape`. */
export async function* messages(stream) {
  const bytes = new Bytes(stream);
  for (;;) {
    const line = await bytes.line();
    if (line === null) return;
    const { arrays: described, ...head } = JSON.parse(line);
    const arrays = {};
    for (const [name, [dtype, shape]] of Object.entries(described)) {
      const kind = KINDS[dtype];
      if (kind === undefined) throw new Error(`an array of type ${dtype} was announced`);
      const size = shape.reduce((product, n) => product * n, 1);
      const raw = await bytes.take(size * kind.BYTES_PER_ELEMENT);
      // A copy of its own starts at an address that the element type allows.
      arrays[name] = { data: new kind(new Uint8Array(raw).buffer), shape };
    }
    yield { head, arrays };
  }
}

/** Write one message; `arrays` has `{ data, shape }` by name, with float32 data. */
export function send(stream, head, arrays = {}) {
  const described = Object.fromEntries(Object.entries(arrays).map(([name, { shape }]) => [name, ["<f4", shape]]));
  stream.write(JSON.stringify({ ...head, arrays: described }) + "\n");
  for (const { data } of Object.values(arrays)) {
    stream.write(Buffer.from(data.buffer, data.byteOffset, data.byteLength));
  }
}

/** The bytes of a stream, by line or by number. */
class Bytes {
  constructor(stream) {
    this.chunks = stream[Symbol.asyncIterator]();
    this.held = Buffer.alloc(0);
  }

  /** The next line without its end; null where the stream ends before one. */
  async line() {
    for (;;) {
      const end = this.held.indexOf(10);
      if (end >= 0) {
        const line = this.held.subarray(0, end).toString("utf8");
        this.held = this.held.subarray(end + 1);
        return line;
      }
      if (!(await this.#more())) return null;
    }
  }

  async take(size) {
    const parts = [this.held];
    let length = this.held.length;
    while (length < size) {
      const { value, done } = await this.chunks.next();
      if (done) throw new Error("the stream ended inside a message");
      parts.push(value);
      length += value.length;
    }
    const all = parts.length === 1 ? this.held : Buffer.concat(parts);
    this.held = all.subarray(size);
    return all.subarray(0, size);
  }

  async #more() {
    const { value, done } = await this.chunks.next();
    if (done) return false;
    this.held = Buffer.concat([this.held, value]);
    return true;
  }
}
