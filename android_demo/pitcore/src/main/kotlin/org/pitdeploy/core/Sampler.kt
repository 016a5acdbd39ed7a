package org.pitdeploy.core

import kotlin.math.exp

/** How a token is drawn. The default is greedy; [topK] 0, [topP] 1, [minP] 0 and penalty 1 are off. */
data class SamplingOptions(
    val temperature: Double = 0.0,
    val topK: Int = 0,
    val topP: Double = 1.0,
    val minP: Double = 0.0,
    val repetitionPenalty: Double = 1.0,
    val seed: ULong = 0u,
) {
    init {
        check("temperature", temperature, temperature >= 0, "of 0 (greedy) or more")
        if (topK < 0) throw InputError("top_k must be a whole number of 0 (off) or more, but is $topK.")
        check("top_p", topP, topP in 0.0..1.0, "from 0 to 1 (off)")
        check("min_p", minP, minP in 0.0..1.0, "from 0 (off) to 1")
        check("repetition_penalty", repetitionPenalty, repetitionPenalty > 0, "above 0")
    }

    private fun check(name: String, value: Double, allowed: Boolean, range: String) {
        if (!value.isFinite() || !allowed) throw InputError("$name must be a finite number $range, but is $value.")
    }

    companion object {
        /** The fields of a Hugging Face generation_config; `do_sample` false or absent means greedy, absent means off. */
        fun ofGenerationConfig(config: Map<String, Any?>, seed: ULong = 0u): SamplingOptions {
            fun number(name: String, default: Double): Double = when (val value = config[name]) {
                null -> default
                is Number -> value.toDouble()
                else -> throw InputError("$name in generation_config.json must be a number, but is '$value'; correct it and export again.")
            }
            val topK = number("top_k", 0.0)
            if (topK != Math.rint(topK) || topK > Int.MAX_VALUE) throw InputError("top_k must be a whole number, but is $topK.")
            return SamplingOptions(
                temperature = if (config["do_sample"] == true) number("temperature", 1.0) else 0.0,
                topK = topK.toInt(),
                topP = number("top_p", 1.0),
                minP = number("min_p", 0.0),
                repetitionPenalty = number("repetition_penalty", 1.0),
                seed = seed,
            )
        }
    }
}

/** The ids that may be drawn, most probable first (equal ones by id), with their probabilities. */
class Candidates(val ids: IntArray, val probabilities: DoubleArray)

/**
 * Draws a token as docs/sampling.md defines it, which pit_deploy/sampling.py does too: the same logits, options and step
 * give the same token.
 */
object Sampler {
    /**
     * [step] is the position in the sequence that the drawn token will take. [previousIds] are the ids of the prompt and of
     * what was generated. Throws [InputError] where a logit is NaN or +inf, or all are -inf.
     */
    fun sample(logits: FloatArray, options: SamplingOptions, step: ULong, previousIds: Collection<Int> = emptyList()): Int {
        val left = filtered(logits, options, previousIds)
        if (left.ids.size == 1) return left.ids[0]
        val cumulative = left.cumulative()
        val target = Philox.uniform(options.seed, step) * cumulative.last()
        return left.ids[cumulative.indexOfFirst { it > target }]
    }

    fun candidates(logits: FloatArray, options: SamplingOptions, previousIds: Collection<Int> = emptyList()): Candidates {
        val left = filtered(logits, options, previousIds)
        val total = left.cumulative().last()
        return Candidates(left.ids, DoubleArray(left.ids.size) { exp(left.scores[it]) / total })
    }

    /** Ids in the order of drawing and their scores less the largest. */
    private class Ordered(val ids: IntArray, val scores: DoubleArray) {
        fun take(count: Int) = if (count == ids.size) this else Ordered(ids.copyOf(count), scores.copyOf(count))

        fun cumulative(): DoubleArray {
            var sum = 0.0
            return DoubleArray(scores.size) { sum += exp(scores[it]); sum }
        }
    }

    private fun filtered(logits: FloatArray, options: SamplingOptions, previousIds: Collection<Int>): Ordered {
        if (logits.isEmpty()) throw InputError("Sampling takes the logits of one position, and there are none.")
        val scores = DoubleArray(logits.size) { logits[it].toDouble() }
        penalise(scores, options.repetitionPenalty, previousIds)
        val best = best(scores)
        if (options.temperature == 0.0) return Ordered(intArrayOf(best), doubleArrayOf(0.0))
        val largest = scores[best]
        for (i in scores.indices) {
            if (scores[i] != Double.NEGATIVE_INFINITY) scores[i] = (scores[i] - largest) / options.temperature
            else scores[i] = Double.NaN
        }
        // Filters keep the front of the order of drawing, so the rest need not be sorted where top_k is on.
        var left = ordered(scores, options)
        if (options.topP < 1) left = topP(left, options.topP)
        if (options.minP > 0) left = left.take(left.scores.count { exp(it) >= options.minP })
        return left
    }

    /** The id of the largest score, the lowest of equal ones. */
    private fun best(scores: DoubleArray): Int {
        var best = 0
        var wrong = 0
        var first = -1
        for (i in scores.indices) {
            if (scores[i].isNaN() || scores[i] == Double.POSITIVE_INFINITY) {
                if (wrong++ == 0) first = i
            }
            if (scores[i] > scores[best]) best = i
        }
        if (wrong > 0) {
            throw InputError(
                "$wrong of ${scores.size} logits are not finite, first at token id $first (${scores[first]}), so no token can be " +
                    "drawn; run the parity check on this bundle.",
            )
        }
        if (scores[best] == Double.NEGATIVE_INFINITY) throw InputError("All ${scores.size} logits are -inf, so there is no token to draw.")
        return best
    }

    private fun penalise(scores: DoubleArray, penalty: Double, previousIds: Collection<Int>) {
        if (penalty == 1.0) return
        for (id in previousIds.toSet()) {
            if (id !in scores.indices) throw InputError("The previous id $id is outside the vocabulary of ${scores.size} rows.")
            scores[id] = if (scores[id] < 0) scores[id] * penalty else scores[id] / penalty
        }
    }

    /** Top-k and the order; NaN marks ids that may not be drawn. */
    private fun ordered(scores: DoubleArray, options: SamplingOptions): Ordered {
        var ids = IntArray(scores.size)
        var count = 0
        for (i in scores.indices) if (!scores[i].isNaN()) ids[count++] = i
        if (options.topK in 1 until count) {
            val sorted = DoubleArray(count) { scores[ids[it]] }.also { it.sort() }
            val border = sorted[count - options.topK]
            val kept = IntArray(count)
            var left = 0
            for (i in 0 until count) if (scores[ids[i]] >= border) kept[left++] = ids[i]
            ids = kept
            count = left
        }
        val order = sortedByScore(ids.copyOf(count), scores)
        return Ordered(order, DoubleArray(count) { scores[order[it]] })
    }

    /** A merge sort of plain numbers: a whole vocabulary is sorted for a token, and boxed ids would cost more than the model. */
    private fun sortedByScore(ids: IntArray, scores: DoubleArray): IntArray {
        var from = ids
        var to = IntArray(ids.size)
        var width = 1
        while (width < ids.size) {
            var start = 0
            while (start < ids.size) {
                val middle = minOf(start + width, ids.size)
                val end = minOf(start + 2 * width, ids.size)
                var left = start
                var right = middle
                for (at in start until end) {
                    // Of equal scores the left one goes first, which has the lower id.
                    val takeLeft = right >= end || (left < middle && scores[from[left]] >= scores[from[right]])
                    to[at] = if (takeLeft) from[left++] else from[right++]
                }
                start = end
            }
            from = to.also { to = from }
            width *= 2
        }
        return from
    }

    /** Removes from the end while the sum of what is removed is at most 1 - p; the first id stays. */
    private fun topP(all: Ordered, p: Double): Ordered {
        val shares = DoubleArray(all.scores.size) { exp(all.scores[it]) }
        val total = shares.sum()
        var removed = 0.0
        var count = all.ids.size
        while (count > 1) {
            removed += shares[count - 1] / total
            if (removed > 1 - p) break
            count--
        }
        return all.take(count)
    }
}
