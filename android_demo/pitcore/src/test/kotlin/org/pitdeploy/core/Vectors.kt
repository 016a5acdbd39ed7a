package org.pitdeploy.core

import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.file.Files
import java.nio.file.Path
import java.nio.file.Paths
import java.util.Base64
import org.junit.Assert.assertEquals
import org.junit.Assert.assertTrue
import org.junit.Assert.fail
import org.pitdeploy.core.json.Json
import org.pitdeploy.core.tokenizer.Tokenizer

typealias Fields = Map<String, Any?>

/** The shared vectors of runtime_tests/vectors; the system property `vectors` names the folder. */
object Vectors {
    val folder: Path = Paths.get(System.getProperty("vectors") ?: "../../runtime_tests/vectors")

    fun load(name: String): Fields = loadFile(folder.resolve(name))

    fun loadFile(file: Path): Fields {
        val document = fields(Json.parse(Files.readAllBytes(file)))
        assertEquals("$file has another format", 1L, document["format"])
        return document
    }

    fun bytes(name: String): ByteArray = Files.readAllBytes(folder.resolve(name))

    fun tokenizer(name: String): Tokenizer = Tokenizer.parse(bytes(name))
}

@Suppress("UNCHECKED_CAST")
fun fields(value: Any?): Fields = value as Fields

fun Fields.list(name: String): List<Any?> = this[name] as List<*>

fun Fields.cases(name: String): List<Fields> = list(name).map { fields(it) }.also { assertTrue("no $name", it.isNotEmpty()) }

fun Fields.part(name: String): Fields = fields(this[name])

fun Fields.text(name: String): String = this[name] as String

fun Fields.int(name: String): Int = (this[name] as Long).toInt()

fun Fields.ints(name: String): List<Int> = ints(this[name])

fun ints(value: Any?): List<Int> = (value as List<*>).map { (it as Long).toInt() }

fun number(value: Any?): Double = if (value is String) value.toDouble() else (value as Number).toDouble()

fun Fields.number(name: String): Double = number(this[name])

fun Fields.samplingOptions(): SamplingOptions = SamplingOptions(
    temperature = number("temperature"),
    topK = int("top_k"),
    topP = number("top_p"),
    minP = number("min_p"),
    repetitionPenalty = number("repetition_penalty"),
    seed = text("seed").toULong(),
)

fun decodeLogits(base64: String): FloatArray {
    val buffer = ByteBuffer.wrap(Base64.getDecoder().decode(base64)).order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer()
    return FloatArray(buffer.remaining()).also { buffer.get(it) }
}

/** Runs [block], which must throw [T]; its message must be one sentence. */
inline fun <reified T : PitError> assertFails(name: String, block: () -> Unit): T {
    try {
        block()
    } catch (error: PitError) {
        if (error !is T) throw AssertionError("$name: ${error::class.simpleName} instead of ${T::class.simpleName}: ${error.message}")
        assertSentence(error.message!!)
        return error
    }
    fail("$name: nothing was thrown")
    throw IllegalStateException()
}

fun assertSentence(text: String) {
    assertTrue("'$text' is no sentence on one line", '\n' !in text && text.length in 20..900 && text.last() in ".!" && text[0] != ' ')
}

/** Answers with recorded logits; a call that was not recorded is a fault of the loop. */
class RecordedBackend(runs: List<Fields>, override val contextLength: Int, override val vocabSize: Int) : DecoderBackend {
    override val name = "recorded"
    private val answers = runs.associate { (it.ints("cached") to it.ints("new")) to it.text("logits") }
    private val cache = ArrayList<Int>()
    var runs = 0
        private set
    var closed = false
        private set

    override val position: Int get() = cache.size

    override fun prefill(ids: IntArray): FloatArray {
        checkRoom(ids)
        val answer = answers[cache.toList() to ids.toList()] ?: throw AssertionError("no run of ${ids.toList()} after $cache was recorded")
        cache.addAll(ids.asList())
        runs++
        return decodeLogits(answer).also { assertEquals(vocabSize, it.size) }
    }

    override fun rewind(position: Int) {
        checkRewind(position)
        while (cache.size > position) cache.removeAt(cache.size - 1)
    }

    override fun close() {
        closed = true
    }
}

/** A model whose n-th run wants the n-th of [draws], and which remembers what it was asked. */
class ScriptedBackend(private val draws: List<Int>, override val contextLength: Int, override val vocabSize: Int, start: Int = 0) : DecoderBackend {
    override val name = "scripted"
    val cache = ArrayList<Int>(List(start) { 3 })
    val asked = ArrayList<List<Int>>()
    val runs: Int get() = asked.size
    var closed = false
        private set

    override val position: Int get() = cache.size

    override fun prefill(ids: IntArray): FloatArray {
        checkRoom(ids)
        cache.addAll(ids.asList())
        asked.add(ids.toList())
        return FloatArray(vocabSize).also { it[draws[runs - 1]] = 1f }
    }

    override fun rewind(position: Int) {
        checkRewind(position)
        while (cache.size > position) cache.removeAt(cache.size - 1)
    }

    override fun close() {
        closed = true
    }
}
