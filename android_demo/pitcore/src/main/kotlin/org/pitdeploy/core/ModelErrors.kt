package org.pitdeploy.core

import org.pitdeploy.core.ModelError.Reason

/** Turns what runtimes throw into one sentence for a person, and a reason that the app can act on. */
object ModelErrors {
    private val VERSION = anyOf("Opset \\d+ is under development", "Unsupported model IR version", "Delegate invalid compatibility")
    private val OPERATORS = anyOf(
        "No Op registered for", "is not a registered function/op", "NOT_IMPLEMENTED", "Could not find an implementation",
        "Operator missing",
    )
    private val MEMORY = anyOf(
        "bad_alloc", "bad allocation", "Failed to allocate memory", "Memory allocation failed", "Cannot allocate memory", "Out of resources",
    )
    private val DAMAGED = anyOf(
        "Protobuf parsing failed", "INVALID_PROTOBUF", "INVALID_GRAPH", "No graph was found", "External data",
        "External initializer", "Deserialize tensor", "Invalid program",
    )
    private val OPERATOR_NAME = Regex("No Op registered for (\\S+)|: *(\\S+)\\(-?\\d+\\) is not a registered")

    /** What [message] of a runtime is about. */
    fun reason(message: String): Reason = when {
        MEMORY.containsMatchIn(message) -> Reason.OUT_OF_MEMORY
        VERSION.containsMatchIn(message) -> Reason.UNSUPPORTED_VERSION
        OPERATORS.containsMatchIn(message) -> Reason.UNSUPPORTED_OPERATORS
        DAMAGED.containsMatchIn(message) -> Reason.DAMAGED_MODEL
        else -> Reason.OTHER
    }

    /** The error of opening [model] in [runtime] (with its version), which ended in [cause]. */
    fun atLoad(model: String, runtime: String, cause: Throwable): ModelError {
        if (cause is OutOfMemoryError) return outOfMemory(model, null, null, cause)
        val message = cause.message ?: cause.toString()
        val reason = reason(message)
        val sentence = when (reason) {
            Reason.OUT_OF_MEMORY -> return outOfMemory(model, null, null, cause)
            Reason.UNSUPPORTED_VERSION ->
                "$model was exported for a newer $runtime than this app has (${short(message)}); update the app, or export the " +
                    "bundle with an older pit-deploy."
            Reason.UNSUPPORTED_OPERATORS -> {
                val match = OPERATOR_NAME.find(message)
                val name = match?.groupValues?.drop(1)?.firstOrNull { it.isNotEmpty() }
                val what = if (name == null) "an operator" else "the operator $name"
                "$model uses $what that $runtime in this app does not have; update the app, or export the bundle with " +
                    "--profile standard."
            }
            Reason.DAMAGED_MODEL -> "$model is damaged or no model (${short(message)}); import the bundle again."
            Reason.OTHER -> "$runtime cannot open $model (${short(message)}); import the bundle again, or update the app."
        }
        return ModelError(reason, sentence, cause)
    }

    /** The error of a run that ended in [cause]. */
    fun atRun(model: String, runtime: String, cause: Throwable): ModelError {
        val message = cause.message ?: cause.toString()
        if (cause is OutOfMemoryError || reason(message) == Reason.OUT_OF_MEMORY) return outOfMemory(model, null, null, cause)
        val sentence = "$runtime failed while running $model (${short(message)}); start a new chat, and check the bundle if it " +
            "happens again."
        return ModelError(reason(message), sentence, cause)
    }

    fun outOfMemory(model: String, needed: Long?, available: Long?, cause: Throwable? = null): ModelError {
        val known = needed != null && available != null
        val numbers = if (known) " (it needs about ${megabytes(needed)} and ${megabytes(available)} are free)" else ""
        return ModelError(
            Reason.OUT_OF_MEMORY,
            "There is not enough memory for $model$numbers; close other apps, or export a smaller bundle (--weights int4, a " +
                "smaller --context).",
            cause,
        )
    }

    private fun anyOf(vararg patterns: String) = Regex(patterns.joinToString("|"), RegexOption.IGNORE_CASE)

    private fun megabytes(bytes: Long) = "${(bytes + 999_999) / 1_000_000} MB"

    /** A runtime's message without status codes and places in its source, on one line. */
    private fun short(message: String): String = message
        .replace(Regex("\\s+"), " ")
        .replace(Regex("^\\[ONNXRuntimeError\\] : \\d+ : \\w+ : "), "")
        .replace(Regex("Load model from \\S+ failed: ?"), "")
        .replace(Regex("Error code - \\w+ - message: "), "")
        .replace(Regex("^\\[Executorch Error 0x[0-9a-f]+\\] "), "")
        .replace(Regex("Detailed logs:.*"), "")
        .replace(Regex("/onnxruntime_src/\\S+:\\d+ .*?\\) (?=[A-Z])"), "")
        .take(160)
        .trimEnd(' ', '.')
}
