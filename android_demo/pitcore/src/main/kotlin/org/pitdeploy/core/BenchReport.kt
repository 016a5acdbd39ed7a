package org.pitdeploy.core

/** The device, as far as it tells. */
class Machine(
    val system: String,
    val architecture: String,
    val processor: String?,
    val cores: Int?,
    val memoryBytes: Long?,
)

/** The bench object of pit_deploy/schemas/bench.schema.json; what a phone does not tell is null. */
object BenchReport {
    fun of(bundle: Bundle, runtime: String, machine: Machine, settings: BenchSettings, figures: BenchFigures): Map<String, Any?> = mapOf(
        "format" to "pit-deploy bench",
        "format_version" to 1,
        "created_by" to mapOf("pit-deploy Android demo" to VERSION, "runtime" to runtime),
        "machine" to mapOf(
            "system" to machine.system,
            "architecture" to machine.architecture,
            "processor" to machine.processor,
            "cores" to machine.cores,
            "memory_bytes" to machine.memoryBytes,
            "load_average" to null,
        ),
        "settings" to mapOf(
            "threads" to listOf(settings.threads),
            "prompt_tokens" to settings.promptTokens,
            "depths" to settings.depths,
            "new_tokens" to settings.newTokens,
            "repeats" to settings.repeats,
            "text" to TEXT,
        ),
        "bandwidth" to emptyList<Any>(),
        "subjects" to listOf(subject(bundle, runtime, settings, figures)),
        "ratios" to emptyList<Any>(),
        "notes" to listOf(NOTE),
    )

    /** The ids that a benchmark runs: the prompts of the golden record, else the texts that check the tokenizer. */
    fun ids(bundle: Bundle, golden: GoldenRecord?): IntArray =
        (golden?.prompts ?: bundle.manifest.tokenizerChecks).flatMap { it.ids.asList() }.toIntArray()

    private fun subject(bundle: Bundle, runtime: String, settings: BenchSettings, figures: BenchFigures): Map<String, Any?> = mapOf(
        "name" to bundle.path.fileName.toString(),
        "kind" to "bundle",
        "runtime" to runtime,
        "path" to bundle.path.toString(),
        "precision" to bundle.manifest.precision,
        "model_bytes" to bundle.modelBytes,
        "total_bytes" to bundle.totalBytes,
        "weight_bytes_per_token" to null,
        "quality" to null,
        "runs" to listOf(run(settings, figures)),
        "notes" to figures.notes + "Loaded once, in the app's own process.",
    )

    private fun run(settings: BenchSettings, figures: BenchFigures): Map<String, Any?> = mapOf(
        "threads" to settings.threads,
        "error" to figures.error,
        "other_cores" to null,
        "load" to load(figures),
        "memory" to memory(figures),
        "prefill" to prefill(figures.prefill),
        "decode" to decode(figures.decode, settings.newTokens),
    )

    private fun load(figures: BenchFigures): Map<String, Any?>? {
        val seconds = figures.loadSeconds ?: return null
        val first = figures.firstTokenSeconds ?: return null
        val warm = mapOf("seconds" to samples(listOf(seconds)), "first_token_seconds" to samples(listOf(first)), "resident_share" to null)
        return mapOf("cold" to null, "warm" to warm)
    }

    private fun memory(figures: BenchFigures): Map<String, Any?>? {
        val before = figures.before ?: return null
        val after = figures.after ?: return null
        val peak = figures.peak ?: return null
        return mapOf(
            "before_load_bytes" to samples(listOf(before.resident.toDouble())),
            "after_load_bytes" to samples(listOf(after.resident.toDouble())),
            "private_after_load_bytes" to after.private?.let { samples(listOf(it.toDouble())) },
            "peak_bytes" to samples(listOf(peak.toDouble())),
        )
    }

    fun prefill(seconds: Map<Int, List<Double>>): List<Map<String, Any?>> = seconds.map { (tokens, values) ->
        mapOf(
            "tokens" to tokens,
            "tokens_per_second" to samples(values.map { tokens / it }),
            "time_to_first_token_seconds" to samples(values),
        )
    }

    fun decode(seconds: Map<Int, List<Double>>, newTokens: Int): List<Map<String, Any?>> = seconds.map { (depth, values) ->
        mapOf(
            "depth" to depth,
            "tokens" to newTokens,
            "tokens_per_second" to samples(values.map { newTokens / it }),
            "bandwidth_share" to null,
        )
    }

    const val VERSION = "0.1.0"
    private const val NOTE =
        "Measured inside the app, all figures in one process: its garbage collector and its screen are part of the machine."
    private const val TEXT = "the prompts of the bundle's golden record, repeated"
}
