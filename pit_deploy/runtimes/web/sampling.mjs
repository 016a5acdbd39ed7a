/** Sampling as Python, Kotlin, Swift and JavaScript share it; docs/sampling.md is the whole definition. */

const WORD = 0xffffffffn;
const LIMIT = 1n << 64n;

/** Four random 32-bit words for a counter of four words and a key of two: Philox 4x32 with 10 rounds. */
export function philox4x32(counter, key) {
  let [c0, c1, c2, c3] = counter.map(BigInt);
  let [k0, k1] = key.map(BigInt);
  for (let round = 0; round < 10; round++) {
    const a = 0xd2511f53n * c0;
    const b = 0xcd9e8d57n * c2;
    [c0, c1, c2, c3] = [(b >> 32n) ^ c1 ^ k0, b & WORD, (a >> 32n) ^ c3 ^ k1, a & WORD];
    k0 = (k0 + 0x9e3779b9n) & WORD;
    k1 = (k1 + 0xbb67ae85n) & WORD;
  }
  return [c0, c1, c2, c3].map(Number);
}

/** A number in [0, 1) of 53 random bits, given by `seed` and `step` alone (each 0 to 2**64 - 1, BigInt or whole). */
export function uniform(seed, step) {
  const s = u64("seed", seed);
  const t = u64("step", step);
  const [w0, w1] = philox4x32([t & WORD, t >> 32n, 0n, 0n], [s & WORD, s >> 32n]);
  return ((w0 >>> 5) * 2 ** 26 + (w1 >>> 6)) / 2 ** 53;
}

/** All options with their defaults: greedy, and every filter off. Throws for a value outside its range. */
export function samplingOptions(given = {}) {
  const options = { temperature: 0, top_k: 0, top_p: 1, min_p: 0, repetition_penalty: 1, seed: 0, ...given };
  const ranges = {
    temperature: [(x) => x >= 0, "of 0 (greedy) or more"],
    top_p: [(x) => x >= 0 && x <= 1, "from 0 to 1 (off)"],
    min_p: [(x) => x >= 0 && x <= 1, "from 0 (off) to 1"],
    repetition_penalty: [(x) => x > 0, "above 0"],
  };
  for (const [name, [allowed, words]] of Object.entries(ranges)) {
    if (!Number.isFinite(options[name]) || !allowed(options[name])) {
      throw new RangeError(`${name} must be a finite number ${words}, but is ${options[name]}.`);
    }
  }
  if (!Number.isInteger(options.top_k) || options.top_k < 0) {
    throw new RangeError(`top_k must be a whole number of 0 (off) or more, but is ${options.top_k}.`);
  }
  u64("seed", options.seed);
  return options;
}

/**
 * Draw one token id from the logits of one position.
 *
 * `step` is the position in the sequence that the drawn token will take; `previousIds` are those of the prompt and of
 * what was generated, for the repetition penalty. Throws where a logit is NaN or infinite, or all are -infinity.
 */
export function sample(logits, options, step, previousIds = []) {
  const { ids, weights } = candidates(logits, samplingOptions(options), previousIds);
  if (ids.length === 1) return ids[0];
  const sums = runningSums(weights);
  const target = uniform(options.seed ?? 0, step) * sums[sums.length - 1];
  return ids[sums.findIndex((sum) => sum > target)];
}

/** The ids that may be drawn, most probable first (equal ones by id), and their probabilities. */
export function probabilities(logits, options, previousIds = []) {
  const { ids, weights } = candidates(logits, samplingOptions(options), previousIds);
  const sums = runningSums(weights);
  return { ids, probabilities: weights.map((weight) => weight / sums[sums.length - 1]) };
}

/** The ids that the filters leave, in the order of drawing, and exp of their scores. */
function candidates(logits, options, previousIds) {
  const scores = Float64Array.from(logits);
  for (const id of new Set(previousIds)) {
    if (!(id in scores))
      throw new RangeError(`The previous id ${id} is outside the vocabulary of ${scores.length} rows.`);
    scores[id] = scores[id] < 0 ? scores[id] * options.repetition_penalty : scores[id] / options.repetition_penalty;
  }
  let best = 0;
  for (let id = 0; id < scores.length; id++) {
    if (Number.isNaN(scores[id])) best = id;
    else if (scores[id] > scores[best]) best = id;
    if (Number.isNaN(scores[best])) break;
  }
  if (!Number.isFinite(scores[best])) throw new RangeError("The logits are not finite, so no token can be drawn.");
  if (options.temperature === 0) return { ids: [best], weights: [1] };

  const largest = scores[best];
  let left = [];
  for (let id = 0; id < scores.length; id++) {
    if (scores[id] > -Infinity) left.push(id);
    scores[id] = (scores[id] - largest) / options.temperature;
  }
  left.sort((a, b) => scores[b] - scores[a] || a - b);
  if (options.top_k > 0 && options.top_k < left.length) {
    const border = scores[left[options.top_k - 1]];
    left = left.filter((id) => scores[id] >= border);
  }
  if (options.top_p < 1) left = left.slice(0, keptByTopP(left, scores, options.top_p));
  if (options.min_p > 0) left = left.filter((id) => Math.exp(scores[id]) >= options.min_p);
  return { ids: left, weights: left.map((id) => Math.exp(scores[id])) };
}

/** How many ids from the start of the order stay: those from its end go while their sum is at most 1 - p. */
function keptByTopP(ids, scores, p) {
  const total = ids.reduce((sum, id) => sum + Math.exp(scores[id]), 0);
  let removed = 0;
  for (let kept = ids.length; kept > 1; kept--) {
    removed += Math.exp(scores[ids[kept - 1]]) / total;
    if (removed > 1 - p) return kept;
  }
  return 1;
}

function runningSums(values) {
  let sum = 0;
  return values.map((value) => (sum += value));
}

function u64(name, value) {
  const whole = typeof value === "bigint" || Number.isSafeInteger(value) ? BigInt(value) : -1n;
  if (whole < 0n || whole >= LIMIT) {
    throw new RangeError(`${name} must be a whole number from 0 to 2**64 - 1 (above 2**53 a BigInt), but is ${value}.`);
  }
  return whole;
}
