package org.pitdeploy.core

import java.nio.ByteBuffer
import java.nio.ByteOrder
import org.pitdeploy.core.json.Json
import org.pitdeploy.core.json.JsonError

/** What the training-time model gave on a few prompts (docs/golden.md). Positions of all prompts follow one another. */
class GoldenRecord private constructor(fields: Map<*, *>, tensors: Safetensors) {
    val prompts: List<TokenizedText> = (fields["prompts"] as List<*>).map {
        val prompt = it as Map<*, *>
        TokenizedText(prompt["text"] as String, ids(prompt["ids"]))
    }
    val positions: Int = prompts.sumOf { it.ids.size }
    val greedyPrompt: Int = (fields["greedy_prompt"] as Long).toInt()
    val greedyIds: IntArray = ids(fields["greedy_ids"])
    val greedyMargins: DoubleArray = (fields["greedy_margins"] as List<*>).map { (it as Number).toDouble() }.toDoubleArray()
    val vocabSize: Int = (fields["vocab_size"] as Long).toInt()
    val tokenizerLength: Int = (fields["tokenizer_length"] as Long).toInt()
    private val topIds = tensors.ints("top_ids", positions)
    private val topLogits = tensors.floats("top_logits", positions)
    val sampledIds: IntArray = tensors.ints("sampled_ids", 1)[0]
    private val sampledLogits = tensors.floats("sampled_logits", positions)
    private val logSumExp = tensors.doubles("logsumexp")

    init {
        require(prompts.isNotEmpty() && prompts.all { it.ids.isNotEmpty() }) { "a prompt is empty" }
        require(logSumExp.size == positions) { "logsumexp has ${logSumExp.size} positions and the prompts have $positions" }
        require(topIds[0].size == topLogits[0].size && sampledIds.size == sampledLogits[0].size) { "ids and logits differ in number" }
        val ids = prompts.flatMap { it.ids.asList() } + greedyIds.asList() + topIds.flatMap { it.asList() } + sampledIds.asList()
        require(ids.all { it in 0 until vocabSize }) { "an id is outside the vocabulary of $vocabSize rows" }
        require(greedyPrompt in prompts.indices && greedyIds.size == greedyMargins.size) {
            "the greedy continuation does not fit the prompts"
        }
    }

    /** Position at which each prompt starts. */
    val starts: List<Int> = prompts.runningFold(0) { at, prompt -> at + prompt.ids.size }.dropLast(1)

    fun topIds(position: Int): IntArray = topIds[position]

    fun topLogits(position: Int): FloatArray = topLogits[position]

    fun sampledLogits(position: Int): FloatArray = sampledLogits[position]

    fun logSumExp(position: Int): Double = logSumExp[position]

    companion object {
        private const val VERSION = 1L

        /** Throws [InputError] where the record is damaged or of another version. */
        fun parse(json: ByteArray, tensors: ByteArray): GoldenRecord {
            val fields = try {
                Json.parse(json) as? Map<*, *>
            } catch (error: JsonError) {
                throw damaged("golden.json is not valid JSON (${error.message})", error)
            } ?: throw damaged("golden.json is not a JSON object", null)
            if (fields["golden_version"] != VERSION) {
                val version = fields["golden_version"]
                throw InputError("golden.json has version $version, and this app reads version $VERSION; update the app.")
            }
            try {
                return GoldenRecord(fields, Safetensors(tensors))
            } catch (error: RuntimeException) { // casts, sizes and places of a file that is not what it says
                throw damaged(error.message ?: "a field is missing", error)
            }
        }

        private fun damaged(reason: String, cause: Throwable?) =
            InputError("The golden record cannot be read: $reason; export the bundle again.", cause)

        private fun ids(value: Any?): IntArray = (value as List<*>).map { (it as Long).toInt() }.toIntArray()
    }
}

/** Tensors of a .safetensors file, by name; rows of equal length. */
internal class Safetensors(bytes: ByteArray) {
    private val data: ByteBuffer
    private val header: Map<*, *>

    init {
        val buffer = ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN)
        require(bytes.size >= 8 && buffer.getLong(0) in 2..bytes.size - 8L) { "golden.safetensors is cut" }
        val length = buffer.getLong(0).toInt()
        header = Json.parse(bytes.copyOfRange(8, 8 + length)) as Map<*, *>
        buffer.position(8 + length)
        data = buffer.slice().order(ByteOrder.LITTLE_ENDIAN)
    }

    fun ints(name: String, rows: Int): List<IntArray> =
        rows(name, "I32", rows) { part, size -> IntArray(size).also { part.asIntBuffer().get(it) } }

    fun floats(name: String, rows: Int): List<FloatArray> =
        rows(name, "F32", rows) { part, size -> FloatArray(size).also { part.asFloatBuffer().get(it) } }

    fun doubles(name: String): DoubleArray =
        rows(name, "F64", 1) { part, size -> DoubleArray(size).also { part.asDoubleBuffer().get(it) } }[0]

    private fun <T> rows(name: String, dtype: String, rows: Int, read: (ByteBuffer, Int) -> T): List<T> {
        val entry = header[name] as? Map<*, *> ?: throw IllegalArgumentException("golden.safetensors has no tensor $name")
        require(entry["dtype"] == dtype) { "$name is of type ${entry["dtype"]} and not $dtype" }
        val (start, end) = (entry["data_offsets"] as List<*>).map { (it as Long).toInt() }
        val width = if (dtype == "F64") 8 else 4
        val inside = start in 0..end && end <= data.capacity() && (end - start) % (width * rows) == 0
        require(inside) { "$name lies outside golden.safetensors" }
        val size = (end - start) / (width * rows)
        return List(rows) { row ->
            val part = data.duplicate().order(ByteOrder.LITTLE_ENDIAN)
            part.position(start + row * size * width)
            read(part, size)
        }
    }
}
