package org.pitdeploy.core

/**
 * One loaded model with one sequence in its cache. The generation loop, parity and benchmarks are written against it.
 *
 * [prefill] and [decode] append to the cache and throw [ContextFullError] before running where the tokens would not fit.
 * Their logits, [vocabSize] of them, are valid until the next call. Calls come from one thread at a time.
 */
interface DecoderBackend : AutoCloseable {
    /** The runtime with its version. */
    val name: String
    val contextLength: Int
    val vocabSize: Int

    /** Tokens in the cache. */
    val position: Int

    /** Appends [ids] (at least one) and returns the logits of the last position. */
    fun prefill(ids: IntArray): FloatArray

    /** Appends one id and returns its logits. */
    fun decode(id: Int): FloatArray = prefill(intArrayOf(id))

    /** Takes back the tokens from [position] on; 0 empties the cache. */
    fun rewind(position: Int)
}

/** Throws where [ids] is empty, does not fit into the rest of the context, or holds an unknown id. */
fun DecoderBackend.checkRoom(ids: IntArray) {
    if (ids.isEmpty()) throw InputError("The prompt has no tokens; write something.")
    if (position + ids.size > contextLength) throw ContextFullError(position, ids.size, contextLength)
    ids.firstOrNull { it !in 0 until vocabSize }
        ?.let { throw InputError("Token id $it is outside the vocabulary of $vocabSize rows; export the bundle again.") }
}

/** Throws [InputError] for a place that is not in the cache. */
fun DecoderBackend.checkRewind(to: Int) {
    if (to !in 0..position) throw InputError("The cache holds $position tokens, so it cannot be taken back to $to.")
}
