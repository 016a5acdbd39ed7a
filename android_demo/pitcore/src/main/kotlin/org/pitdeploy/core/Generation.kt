package org.pitdeploy.core

enum class FinishReason(val word: String) {
    STOP("stop"), LENGTH("length"), CONTEXT_FULL("context_full"), CANCELLED("cancelled")
}

/**
 * What one call generated, and why it ended. [ids] never holds the stop id; that is [stopId].
 *
 * [prefillSeconds] is the prompt's run and the first draw, [decodeSeconds] all later runs and draws.
 */
class Generation(
    val ids: List<Int>,
    val reason: FinishReason,
    val stopId: Int?,
    val promptTokens: Int,
    val prefillSeconds: Double,
    val decodeSeconds: Double,
) {
    /** The id drawn last, which the cache lacks: a next turn's prompt begins with it. */
    val pendingIds: List<Int> get() = if (stopId != null) listOf(stopId) else ids.takeLast(1)

    /** Tokens drawn after the first (a stop id counts) by decode time; 0 where there are none. */
    val tokensPerSecond: Double
        get() {
            val drawn = ids.size + (if (stopId != null) 1 else 0) - 1
            return if (drawn > 0 && decodeSeconds > 0) drawn / decodeSeconds else 0.0
        }
}

/**
 * Runs the prompt, then draws up to [maxNewTokens] ids; every token runs through the model at most once.
 *
 * The prompt is appended to what the cache holds; [history] names the ids already in it for the repetition penalty. It
 * ends on one of [stopIds], after [maxNewTokens], when the last id no longer fits into the context, or when [onToken]
 * returns false; what was generated is kept. Throws [InputError] for an empty prompt or an unknown id, and
 * [ContextFullError] for a prompt that does not fit, both before anything runs.
 */
fun generate(
    backend: DecoderBackend,
    promptIds: IntArray,
    maxNewTokens: Int,
    options: SamplingOptions,
    stopIds: Collection<Int>,
    history: Collection<Int> = emptyList(),
    onToken: (Int) -> Boolean = { true },
): Generation {
    if (maxNewTokens < 0) throw InputError("max_new_tokens must be 0 or more, but is $maxNewTokens.")
    backend.checkRoom(promptIds)
    val seen = HashSet(history).also { it.addAll(promptIds.asList()) }
    val ids = ArrayList<Int>()
    var stopId: Int? = null
    var going = true
    var prefill = 0.0
    var decode = 0.0

    fun endBeforeRun(): FinishReason? = when {
        !going -> FinishReason.CANCELLED
        ids.size >= maxNewTokens -> FinishReason.LENGTH
        ids.isNotEmpty() && backend.position >= backend.contextLength -> FinishReason.CONTEXT_FULL
        else -> null
    }

    while (true) {
        endBeforeRun()?.let { return Generation(ids, it, stopId, promptIds.size, prefill, decode) }
        val started = System.nanoTime()
        val logits = if (ids.isEmpty()) backend.prefill(promptIds) else backend.decode(ids.last())
        // The position of the new token counts the random numbers, so a second turn does not see the first one's again.
        val id = Sampler.sample(logits, options, backend.position.toULong(), seen)
        val seconds = (System.nanoTime() - started) / 1e9
        if (ids.isEmpty()) prefill = seconds else decode += seconds
        if (id in stopIds) {
            stopId = id
            return Generation(ids, FinishReason.STOP, stopId, promptIds.size, prefill, decode)
        }
        ids.add(id)
        seen.add(id)
        going = onToken(id)
    }
}
