package org.pitdeploy.core

import kotlin.math.abs
import kotlin.math.exp
import kotlin.math.ln
import kotlin.math.max

/** One position's logits against the record. */
class PositionError(val kl: Double, val maxAbs: Double, val top1: Boolean)

/** The result of a comparison, with the figures of `pit-deploy verify --json`. */
class ParityReport(
    val gate: Gate,
    val rows: List<PositionError>,
    val onePassAgainstSteps: Double,
    val greedyTokens: Int,
    val greedyEqual: Int,
) {
    val meanKl: Double = rows.sumOf { it.kl } / rows.size
    val worstKl: Double = largest(rows.map { it.kl })
    val maxAbs: Double = largest(rows.map { it.maxAbs })
    val top1: Double = rows.count { it.top1 }.toDouble() / rows.size

    /** What is out of tolerance, a sentence each. */
    val failures: List<String> = buildList {
        if (!(meanKl.isFinite() && maxAbs.isFinite())) add("Some logits are not finite.")
        gate.maxAbs?.let {
            if (!(maxAbs <= it)) add("The largest logit error ${show(maxAbs)} is above ${show(it)}.")
            if (!(onePassAgainstSteps <= it)) add("One pass and step by step differ by ${show(onePassAgainstSteps)}, above ${show(it)}.")
        }
        if (!(meanKl <= gate.meanKl)) add("The mean KL ${show(meanKl)} is above ${show(gate.meanKl)}.")
        if (!(top1 >= gate.top1)) add("The top-1 agreement ${show(top1)} is below ${show(gate.top1)}.")
        if (gate.greedy && greedyEqual < greedyTokens) add("Greedy decoding differs at token $greedyEqual of $greedyTokens.")
    }

    val passed: Boolean get() = failures.isEmpty()

    fun toJson(): Map<String, Any?> = mapOf(
        "passed" to passed,
        "failures" to failures,
        "positions" to rows.size,
        "max_abs_logit_error" to finite(maxAbs),
        "mean_kl" to finite(meanKl),
        "worst_kl" to finite(worstKl),
        "top1" to top1,
        "one_pass_against_steps_max_abs" to finite(onePassAgainstSteps),
        "greedy_tokens" to greedyTokens,
        "greedy_equal" to greedyEqual,
    )

    private companion object {
        fun show(value: Double): String = "%.3g".format(java.util.Locale.ROOT, value)

        fun finite(value: Double): Double? = value.takeIf { it.isFinite() }

        /** NaN where one of them is. */
        fun largest(values: List<Double>): Double = values.reduce { a, b -> if (a.isNaN() || b.isNaN()) Double.NaN else max(a, b) }
    }
}

/** Compares a backend with the golden record of its bundle, as `pit-deploy verify` does. */
object Parity {
    /**
     * Every position decoded step by step, the last of each prompt in one pass too, and the greedy continuation.
     * [progress] returns false to cancel, which throws [InputError]. Leaves the cache empty.
     */
    fun check(
        golden: GoldenRecord,
        backend: DecoderBackend,
        gate: Gate,
        endIds: Collection<Int>,
        progress: (done: Int, total: Int) -> Boolean = { _, _ -> true },
    ): ParityReport {
        val longest = golden.prompts.maxOf { it.ids.size }
        if (longest > backend.contextLength || golden.vocabSize != backend.vocabSize) {
            throw InputError(
                "The golden record (longest prompt $longest, vocabulary ${golden.vocabSize}) does not belong to this model " +
                    "(context ${backend.contextLength}, vocabulary ${backend.vocabSize}); export the bundle again.",
            )
        }
        val rows = ArrayList<PositionError>()
        var difference = 0.0
        golden.prompts.forEachIndexed { number, prompt ->
            val start = golden.starts[number]
            backend.rewind(0)
            val onePass = backend.prefill(prompt.ids).copyOf()
            backend.rewind(0)
            var logits = onePass
            prompt.ids.forEachIndexed { offset, id ->
                logits = backend.decode(id)
                rows.add(compare(golden, start + offset, logits))
                if (!progress(rows.size, golden.positions)) {
                    backend.rewind(0)
                    throw InputError("The parity check was stopped at position ${rows.size} of ${golden.positions}.")
                }
            }
            // The last position is judged as the worse of one pass and step by step.
            val last = compare(golden, start + prompt.ids.size - 1, onePass)
            if (ORDER.compare(last, rows.last()) > 0) rows[rows.size - 1] = last
            for (id in 0 until golden.tokenizerLength) difference = larger(difference, abs(onePass[id] - logits[id]).toDouble())
        }
        val equal = greedyEqual(golden, backend, endIds)
        backend.rewind(0)
        return ParityReport(gate, rows, difference, golden.greedyIds.size, equal)
    }

    /**
     * KL is exact over the recorded largest logits; the rest of the vocabulary enters as one event, so the figure misses
     * only differences within that rest.
     */
    fun compare(golden: GoldenRecord, position: Int, logits: FloatArray): PositionError {
        val ids = golden.topIds(position)
        val reference = golden.topLogits(position)
        val total = logSumExp(logits)
        var kl = 0.0
        var sumP = 0.0
        var sumQ = 0.0
        var error = 0.0
        for (i in ids.indices) {
            val logP = reference[i] - golden.logSumExp(position)
            val logQ = logits[ids[i]] - total
            kl += exp(logP) * (logP - logQ)
            sumP += exp(logP)
            sumQ += exp(logQ)
            error = larger(error, abs(logits[ids[i]] - reference[i]).toDouble())
        }
        val restP = max(1 - sumP, 0.0)
        if (restP > 1e-12) kl += restP * ln(restP / (if (sumQ.isNaN()) sumQ else max(1 - sumQ, 1e-300)))
        golden.sampledIds.forEachIndexed { i, id -> error = larger(error, abs(logits[id] - golden.sampledLogits(position)[i]).toDouble()) }
        val best = largest(logits)
        val place = ids.indexOf(best)
        val agrees = best == ids[0] || (place >= 0 && reference[0].toDouble() - reference[place] <= Gate.TIE)
        return PositionError(if (kl.isNaN()) kl else max(kl, 0.0), error, agrees)
    }

    /** Leading greedy tokens that agree. After a tie the continuations are different texts, and all count as equal. */
    private fun greedyEqual(golden: GoldenRecord, backend: DecoderBackend, endIds: Collection<Int>): Int {
        backend.rewind(0)
        var logits = backend.prefill(golden.prompts[golden.greedyPrompt].ids)
        for (step in golden.greedyIds.indices) {
            val id = largest(logits)
            if (id != golden.greedyIds[step]) return if (golden.greedyMargins[step] <= Gate.TIE) golden.greedyIds.size else step
            if (id in endIds || backend.position >= backend.contextLength) return step + 1
            if (step + 1 < golden.greedyIds.size) logits = backend.decode(id)
        }
        return golden.greedyIds.size
    }

    /** The lowest id of the largest logit; the first that is not a number, where there is one. */
    fun largest(logits: FloatArray): Int {
        var best = 0
        for (i in logits.indices) {
            if (logits[i].isNaN()) return i
            if (logits[i] > logits[best]) best = i
        }
        return best
    }

    fun logSumExp(logits: FloatArray): Double {
        val largest = logits[largest(logits)].toDouble()
        var sum = 0.0
        for (value in logits) sum += exp(value - largest)
        return largest + ln(sum)
    }

    private fun larger(a: Double, b: Double): Double = if (a.isNaN() || b.isNaN()) Double.NaN else max(a, b)

    /** Python's order of (not top-1, KL, error). */
    private val ORDER = compareBy<PositionError>({ !it.top1 }, { it.kl }, { it.maxAbs })
}
