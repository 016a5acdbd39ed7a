package org.pitdeploy.core

import org.pitdeploy.core.json.Json
import org.pitdeploy.core.json.JsonError
import org.pitdeploy.core.json.JsonSchema
import org.pitdeploy.core.json.SchemaProblem

/** A file of the bundle. */
class FileEntry(val path: String, val size: Long, val sha256: String)

/** A text and its token ids. */
class TokenizedText(val text: String, val ids: IntArray)

/** What lasts from one call of the graph to the next; [output] is null where the runtime keeps it itself. */
class StateEntry(val name: String, val output: String?, val dtype: String)

/** What an app reads of manifest.json; docs/bundle.md explains each field. The whole text was checked by [parse]. */
class Manifest private constructor(fields: Map<String, Any?>) {
    val sourceName: String = fields.part("source").text("name")
    val runtime: String = fields.text("runtime")
    val profile: String = fields.text("profile")
    val modelFile: String = fields.text("model_file")
    val weights: String = fields.part("precision").text("weights")
    val tables: String = fields.part("precision").text("tables")
    val layers: Int = fields.part("architecture").number("num_hidden_layers")
    val keyValueHeads: Int = fields.part("architecture").number("num_key_value_heads")
    val headDim: Int = fields.part("architecture").number("head_dim")
    val states: List<StateEntry> = fields.parts("states").map { StateEntry(it.text("name"), it["output"] as String?, it.text("dtype")) }
    val logits: String = fields.text("logits")
    val vocabSize: Int = fields.number("vocab_size")
    val tokenizerLength: Int = fields.number("tokenizer_length")
    val contextLength: Int = fields.number("context_length")
    val bosId: Int? = (fields["bos_id"] as Long?)?.toInt()
    val endIds: List<Int> = fields.ids("end_ids").toList()
    val hasChatTemplate: Boolean = fields["chat_template"] as Boolean
    val tokenizerChecks: List<TokenizedText> = fields.parts("tokenizer_checks").map { it.tokenized() }

    /** Mean KL of a nested head on calibration text; null where there is none, or it was not measured. */
    val nestedKl: Double? = ((fields["nested_head"] as Map<*, *>?)?.get("kl") as Number?)?.toDouble()
    val goldenFile: String? = (fields["golden"] as Map<*, *>?)?.get("file") as String?
    private val goldenPrompts: List<TokenizedText> =
        fields["golden"]?.let { fields.part("golden").parts("prompts").map { p -> p.tokenized() } } ?: emptyList()
    val files: List<FileEntry> = fields.parts("files").map {
        FileEntry(it.text("path"), it["size"] as Long, it.text("sha256"))
    }

    /** `int8`, or `int8, tables fp16`. */
    val precision: String get() = if (weights == tables) weights else "$weights, tables $tables"

    private fun checkRules(fields: Map<String, Any?>, where: String) {
        fun refuse(kind: String, field: String, value: Any?, reason: String): Nothing = throw fault(
            kind,
            where,
            "the field '$field' is ${show(value)}: $reason",
        )

        fun checkIds(kind: String, field: String, ids: IntArray) = ids.forEach {
            if (it >= tokenizerLength) refuse(kind, field, it.toLong(), "it should be below the tokenizer's length, $tokenizerLength")
        }

        fun checkUnique(field: String, values: List<Any>) =
            values.groupBy { it }.entries.firstOrNull { it.value.size > 1 }?.let { refuse("bad_value", field, it.key, "it is there twice") }

        if (tokenizerLength > vocabSize) {
            val reason = "the tokenizer has ids that the table of $vocabSize rows (vocab_size) lacks"
            refuse("bad_vocabulary", "tokenizer_length", tokenizerLength.toLong(), reason)
        }
        checkIds("bad_end_id", "end_ids", endIds.toIntArray())
        checkUnique("end_ids", endIds)
        bosId?.let { checkIds("bad_token_id", "bos_id", intArrayOf(it)) }
        tokenizerChecks.forEachIndexed { i, check -> checkIds("bad_token_id", "tokenizer_checks.$i.ids", check.ids) }
        goldenPrompts.forEachIndexed { i, prompt -> checkIds("bad_token_id", "golden.prompts.$i.ids", prompt.ids) }

        val hidden = fields["hidden_states"] as List<*>
        if (hidden.size !in setOf(0, layers + 1)) {
            refuse("bad_value", "hidden_states", hidden, "it should be empty or have ${layers + 1} names")
        }
        val tensors = fields.parts("quantization").map { it.text("name") }
        val worst = (fields["quantization_summary"] as Map<*, *>?)?.get("worst")
        if ((worst == null) != tensors.isEmpty()) {
            val reason = "it should be null exactly where 'quantization' is empty, and that has ${tensors.size} tensors"
            refuse("bad_value", "quantization_summary", worst, reason)
        }
        if (worst != null && worst !in tensors) {
            refuse("bad_value", "quantization_summary.worst", worst, "it is not among the tensors of 'quantization'")
        }
        checkUnique("quantization", tensors)
        if ((fields["coreml"] == null) != (runtime != "coreml")) {
            val reason = "it should be null exactly where 'runtime' is not 'coreml', and that is '$runtime'"
            refuse("bad_value", "coreml", if (fields["coreml"] == null) null else "an object", reason)
        }
        val paths = files.map { it.path }
        checkUnique("files", paths)
        if (Bundle.MANIFEST in paths) refuse("bad_value", "files", Bundle.MANIFEST, "a manifest cannot list itself")
        if (paths.none { it == modelFile || it.startsWith("$modelFile/") }) {
            refuse("unlisted_file", "model_file", modelFile, "it is not listed in 'files'")
        }
        fields["coreml"]?.let { program ->
            (program as Map<*, *>).let { it["functions"] as List<*> }.forEachIndexed { i, function ->
                val name = (function as Map<*, *>)["package"] as String
                if (paths.none { it.startsWith("$name/") }) {
                    refuse("unlisted_file", "coreml.functions.$i.package", name, "it is no folder of files in 'files'")
                }
            }
        }
        if (goldenFile != null && goldenFile !in paths) {
            refuse("unlisted_file", "golden.file", goldenFile, "it is not listed in 'files'")
        }
    }

    companion object {
        const val FORMAT = "pit-deploy bundle"
        const val FORMAT_VERSION = 1L
        internal const val AGAIN = "export the bundle again, or fetch it again from where it came."

        private val schema: JsonSchema by lazy {
            val text = Manifest::class.java.getResourceAsStream("/manifest.schema.json")!!.use { it.readBytes() }
            @Suppress("UNCHECKED_CAST")
            JsonSchema(Json.parse(text) as Map<String, Any?>)
        }

        /** Reads a manifest's text; throws [BundleError], one sentence that names [where], for anything wrong with it. */
        fun parse(bytes: ByteArray, where: String): Manifest {
            val data = try {
                Json.parse(bytes)
            } catch (error: JsonError) {
                val place = if (error.line > 0) " at line ${error.line}, column ${error.column}" else ""
                throw BundleError("bad_json", "$where is not valid JSON$place (${error.message}); $AGAIN")
            }
            @Suppress("UNCHECKED_CAST")
            val fields = data as? Map<String, Any?>
            if (fields == null || fields["format"] != FORMAT) {
                val found = if (fields == null) "it is no object" else "'format' is ${show(fields["format"])}"
                throw BundleError(
                    "not_a_bundle",
                    "$where is not the manifest of a pit-deploy bundle ($found, and a manifest is an object whose " +
                        "'format' is '$FORMAT'); choose the folder that pit-deploy export wrote.",
                )
            }
            checkVersion(fields, where)
            schema.firstProblem(fields)?.let { throw schemaFault(it, where) }
            return Manifest(fields).also { it.checkRules(fields, where) }
        }

        private fun checkVersion(fields: Map<String, Any?>, where: String) {
            if ("format_version" !in fields) throw fault("missing_field", where, "the field 'format_version' is missing")
            val version = fields["format_version"]
            if (version !is Long) {
                throw fault("bad_value", where, "the field 'format_version' is ${show(version)}: it should be an integer")
            }
            val both = "$where has format version $version, and this app reads version $FORMAT_VERSION"
            if (version > FORMAT_VERSION) throw BundleError("newer_version", "$both; update the app.")
            if (version < FORMAT_VERSION) {
                throw BundleError("older_version", "$both; export the bundle again with this version's pit-deploy.")
            }
        }

        private fun schemaFault(problem: SchemaProblem, where: String): BundleError {
            val field = problem.path
            return when {
                problem.rule == "required" -> fault("missing_field", where, "the field '$field' is missing")
                problem.rule == "additionalProperties" ->
                    fault("unknown_field", where, "format version $FORMAT_VERSION has no field '$field' (it is ${show(problem.value)})")
                // Of the patterns only the one for paths has a rule about dots.
                problem.rule == "pattern" && "\\.{1,2}" in (problem.limit as String) ->
                    fault(
                        "path_escape",
                        where,
                        "the field '$field' is ${show(problem.value)}: paths are relative, with '/', and may not leave the bundle",
                    )
                else -> fault("bad_value", where, "the field '$field' is ${show(problem.value)}: ${problem.rule} is ${show(problem.limit)}")
            }
        }

        private fun fault(kind: String, where: String, found: String) = BundleError(kind, "$where: $found; $AGAIN")

        /** A value from a stranger's file, on one line and short. */
        internal fun show(value: Any?): String {
            val text = if (value is String) "'$value'" else "$value"
            val plain = text.map { if (it.isISOControl()) ' ' else it }.joinToString("")
            return if (plain.length <= 80) plain else plain.take(77) + "..."
        }

        // The schema was checked before any of these is called.
        @Suppress("UNCHECKED_CAST")
        private fun Map<String, Any?>.part(name: String) = this[name] as Map<String, Any?>

        @Suppress("UNCHECKED_CAST")
        private fun Map<String, Any?>.parts(name: String) = this[name] as List<Map<String, Any?>>

        private fun Map<String, Any?>.text(name: String) = this[name] as String

        private fun Map<String, Any?>.number(name: String) = (this[name] as Long).toInt()

        private fun Map<String, Any?>.ids(name: String) = (this[name] as List<*>).map { (it as Long).toInt() }.toIntArray()

        private fun Map<String, Any?>.tokenized() = TokenizedText(text("text"), ids("ids"))
    }
}
