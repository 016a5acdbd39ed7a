package org.pitdeploy.core

/** What is measured; [text] says where the ids come from. */
class BenchSettings(
    val threads: Int,
    val promptTokens: List<Int> = listOf(128, 512),
    val depths: List<Int> = listOf(0, 512),
    val newTokens: Int = 32,
    val repeats: Int = 5,
)

/** Resident memory of this process, and the part of it that is not file pages; null where the system does not tell. */
class MemoryUse(val resident: Long, val private: Long?, val peak: Long)

/** What was measured at one number of threads; seconds. */
class BenchFigures {
    var loadSeconds: Double? = null
    var firstTokenSeconds: Double? = null
    var before: MemoryUse? = null
    var after: MemoryUse? = null
    var peak: Long? = null
    val prefill = LinkedHashMap<Int, MutableList<Double>>()
    val decode = LinkedHashMap<Int, MutableList<Double>>()
    var error: String? = null
    val notes = ArrayList<String>()
}

/** Times a bundle in this process: load, prefill by prompt length, decode by depth (docs/benchmarks.md). */
class Benchmark(private val settings: BenchSettings, private val memory: () -> MemoryUse?) {
    /**
     * [ids] are repeated where they are too few. A figure that fails leaves its reason in `error`, and the others stay.
     * [progress] returns false to stop.
     */
    fun run(ids: IntArray, open: () -> DecoderBackend, progress: (done: Int, total: Int) -> Boolean = { _, _ -> true }): BenchFigures {
        val figures = BenchFigures()
        try {
            figures.before = memory()
            val started = System.nanoTime()
            open().use { backend ->
                figures.loadSeconds = since(started)
                figures.after = memory()
                measure(backend, ids, started, figures, progress)
            }
        } catch (error: PitError) {
            figures.error = error.message
        }
        return figures
    }

    private fun measure(backend: DecoderBackend, ids: IntArray, started: Long, figures: BenchFigures, progress: (Int, Int) -> Boolean) {
        val prompts = settings.promptTokens.filter { fits(it, backend, "a prompt of $it tokens", figures) }
        val depths = settings.depths.filter { fits(it + settings.newTokens, backend, "depth $it", figures) }
        val longest = maxOf(prompts.maxOrNull() ?: 1, (depths.maxOrNull() ?: 0) + settings.newTokens)
        val text = IntArray(longest) { ids[it % ids.size] }
        val total = settings.repeats * (prompts.size + depths.size)
        var done = 0
        prompts.minOrNull()?.let { length ->
            Parity.largest(backend.prefill(text.copyOf(length)))
            figures.firstTokenSeconds = since(started)
        }
        // Everything once, untimed: buffers are made, weights are read, and the peak is reached.
        prompts.maxOrNull()?.let { prefill(backend, text, it) }
        depths.maxOrNull()?.let { decode(backend, text, it) }
        figures.peak = memory()?.peak
        repeat(settings.repeats) {
            for (length in prompts) {
                figures.prefill.getOrPut(length) { ArrayList() }.add(prefill(backend, text, length))
                if (!progress(++done, total)) throw InputError("The benchmark was stopped after $done of $total samples.")
            }
            for (depth in depths) {
                figures.decode.getOrPut(depth) { ArrayList() }.add(decode(backend, text, depth))
                if (!progress(++done, total)) throw InputError("The benchmark was stopped after $done of $total samples.")
            }
        }
    }

    private fun fits(tokens: Int, backend: DecoderBackend, what: String, figures: BenchFigures): Boolean {
        if (tokens <= backend.contextLength) return true
        figures.notes.add("The context of ${backend.contextLength} tokens has no room for $what, which is left out.")
        return false
    }

    /** Seconds from the ids to the first token, from an empty cache. */
    private fun prefill(backend: DecoderBackend, text: IntArray, length: Int): Double {
        wake(backend, text)
        val started = System.nanoTime()
        Parity.largest(backend.prefill(text.copyOf(length)))
        return since(started)
    }

    /** Seconds of decoding, after a context of [depth] tokens. */
    private fun decode(backend: DecoderBackend, text: IntArray, depth: Int): Double {
        wake(backend, text)
        if (depth > 0) backend.prefill(text.copyOf(depth))
        val started = System.nanoTime()
        for (i in 0 until settings.newTokens) Parity.largest(backend.decode(text[depth + i]))
        return since(started)
    }

    /** A few tokens, so that threads are awake. */
    private fun wake(backend: DecoderBackend, text: IntArray) {
        backend.rewind(0)
        for (i in 0 until minOf(4, text.size)) backend.decode(text[i])
        backend.rewind(0)
    }

    private fun since(started: Long) = (System.nanoTime() - started) / 1e9
}

/** Median, smallest, largest and all samples, as the bench object has them. */
fun samples(values: List<Double>): Map<String, Any> {
    val sorted = values.sorted()
    val middle = sorted.size / 2
    val median = if (sorted.size % 2 == 1) sorted[middle] else (sorted[middle - 1] + sorted[middle]) / 2
    return mapOf("median" to median, "min" to sorted.first(), "max" to sorted.last(), "samples" to values)
}
