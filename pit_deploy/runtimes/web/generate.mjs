/** The generation loop over a decoder; docs/sampling.md has the rules that all languages share. */

import { ContextFullError } from "./decoder.mjs";
import { sample, samplingOptions } from "./sampling.mjs";

/**
 * Continue `promptIds` and return what was generated.
 *
 * `decoder` has `position`, `contextLength` and `prefill(ids)`, which appends and returns the last position's logits.
 * `stopIds` are the manifest's end ids, `history` ids of earlier turns for the repetition penalty. `onToken(id)` is
 * called with each id; where it returns false, generation ends before the next one.
 *
 * The result has `ids`, `finishReason` ("stop", "length", "context_full" or "cancelled"), `stopId` (or null; never
 * among the ids) and `pendingIds`, with which a next turn's prompt begins. Throws `ContextFullError` for a prompt that
 * does not fit and `RangeError` for an empty one, before anything runs.
 */
export async function generate(
  decoder,
  promptIds,
  { maxNewTokens, stopIds, options = {}, history = [], onToken = () => true, cancelled = false },
) {
  const checked = samplingOptions(options);
  if (!Number.isInteger(maxNewTokens) || maxNewTokens < 0) {
    throw new RangeError(`maxNewTokens must be 0 or more, but is ${maxNewTokens}.`);
  }
  if (promptIds.length === 0) throw new RangeError("The prompt has no tokens; give at least one.");
  if (decoder.position + promptIds.length > decoder.contextLength) {
    throw new ContextFullError(decoder.position, promptIds.length, decoder.contextLength);
  }
  const stops = new Set(stopIds);
  const seen = new Set([...history, ...promptIds]);
  const ids = [];
  const result = (finishReason, stopId = null) => {
    return { ids, finishReason, stopId, pendingIds: stopId === null ? ids.slice(-1) : [stopId] };
  };
  for (;;) {
    if (cancelled) return result("cancelled");
    if (ids.length >= maxNewTokens) return result("length");
    if (ids.length > 0 && decoder.position >= decoder.contextLength) return result("context_full");
    const logits = await decoder.prefill(ids.length > 0 ? ids.slice(-1) : promptIds);
    const id = sample(logits, checked, decoder.position, seen);
    if (stops.has(id)) return result("stop", id);
    ids.push(id);
    seen.add(id);
    cancelled = onToken(id) === false;
  }
}
