package org.pitdeploy.core

import java.nio.file.Files
import java.nio.file.Path
import java.nio.file.Paths
import org.junit.Assert.assertEquals
import org.junit.Assert.assertFalse
import org.junit.Assert.assertTrue
import org.junit.Assume.assumeTrue
import org.junit.Test
import org.pitdeploy.core.json.Json
import org.pitdeploy.core.json.toJson
import org.pitdeploy.core.tokenizer.Pattern
import org.pitdeploy.core.tokenizer.TextStream
import org.pitdeploy.core.tokenizer.Tokenizer
import org.pitdeploy.core.tokenizer.codePoints
import org.pitdeploy.core.tokenizer.lenientUtf8

class TokenizerTest {
    @Test
    fun `the committed tokenizers give the ids of Hugging Face's`() = check(Vectors.load("tokens.json"))

    /** `make test-android` writes this file with 6,000 texts and the small tokenizers. */
    @Test
    fun `many texts give the ids of Hugging Face's`() = generated("tokens.small")

    /** The same with the sample's tokenizer, where there is one. */
    @Test
    fun `the sample's tokenizer gives the ids of Hugging Face's`() = generated("tokens.sample")

    @Test
    fun `the sample's chats have transformers' text and ids`() {
        val document = document("tokens.sample")
        val tokenizers = document.cases("tokenizers").associate { it.text("name") to Tokenizer.parse(Files.readAllBytes(file(it.text("file")))) }
        for (chats in document.cases("chats")) {
            val template = ChatTemplate(chats.text("template"), chats.part("special_tokens"))
            for (case in chats.cases("cases")) {
                val text = template.render(case.cases("messages").map { Message(it.text("role"), it.text("content")) })
                assertEquals(case.text("text"), text)
                assertEquals(text, case.ints("ids"), tokenizers.getValue(case.text("tokenizer")).encode(text).toList())
            }
        }
    }

    private fun document(property: String): Fields {
        val file = System.getProperty(property)
        assumeTrue("the property $property names no file: run make test-android", !file.isNullOrEmpty())
        return Vectors.loadFile(Paths.get(file))
    }

    private fun generated(property: String) {
        val document = document(property)
        assertTrue(document.list("texts").size >= 5000)
        check(document)
    }

    private fun check(document: Fields) {
        val texts = document.list("texts").map { it as String }
        val halves = document.cases("surrogates")
        for (entry in document.cases("tokenizers")) {
            val name = entry.text("name")
            val tokenizer = Tokenizer.parse(Files.readAllBytes(file(entry.text("file"))))
            texts.forEachIndexed { i, text ->
                val ids = tokenizer.encode(text)
                assertEquals("$name, text $i: ${toJson(text)}", ints(entry.list("ids")[i]), ids.toList())
                assertEquals("$name, decoded $i", entry.list("decoded")[i] ?: text, tokenizer.decode(ids.toList()))
            }
            halves.forEachIndexed { i, half ->
                val text = String(CharArray(half.ints("units").size) { half.ints("units")[it].toChar() })
                assertEquals("$name, surrogates $i", ints(entry.list("surrogate_ids")[i]), tokenizer.encode(text).toList())
                assertEquals("$name, replaced $i", ints(entry.list("surrogate_ids")[i]), tokenizer.encode(half.text("text")).toList())
            }
            for (prompt in entry.cases("prompts")) {
                assertEquals("$name, prompt ${prompt["text"]}", prompt.ints("ids"), tokenizer.encode(prompt.text("text"), true).toList())
            }
            for (case in entry.cases("streams")) {
                val stream = TextStream(tokenizer)
                val pieces = case.ints("ids").map { stream.push(it) } + stream.finish()
                assertEquals("$name, stream ${case["ids"]}", case.list("pieces"), pieces)
                assertEquals(pieces.joinToString(""), tokenizer.decode(case.ints("ids")))
            }
        }
    }

    private fun file(name: String): Path = Paths.get(name).let { if (it.isAbsolute) it else Vectors.folder.resolve(name) }

    @Test
    fun `parts that are not known are refused by name`() {
        val base = fields(Json.parse(Vectors.bytes("tokenizers/byte_level.json")))
        val model = base.part("model")
        val wrong = mapOf(
            "WordPiece" to base + ("model" to model + ("type" to "WordPiece")),
            "continuing_subword_prefix" to base + ("model" to model + ("continuing_subword_prefix" to "##")),
            "Lowercase" to base + ("normalizer" to mapOf("type" to "Lowercase")),
            "BertPreTokenizer" to base + ("pre_tokenizer" to mapOf("type" to "BertPreTokenizer")),
            "CTC" to base + ("decoder" to mapOf("type" to "CTC")),
            "RobertaProcessing" to base + ("post_processor" to mapOf("type" to "RobertaProcessing")),
            "merge 0" to base + ("model" to model + ("merges" to listOf("zz yy"))),
            "'vocab'" to base + ("model" to model - "vocab"),
        )
        for ((name, tokenizer) in wrong) {
            val error = assertFails<InputError>(name) { Tokenizer.parse(toJson(tokenizer).toByteArray()) }
            assertTrue("${error.message} does not name $name", name in error.message!!)
        }
        assertFails<InputError>("cut") { Tokenizer.parse(Vectors.bytes("tokenizers/byte_level.json").copyOf(500)) }
    }

    @Test
    fun `patterns with lookahead match as written`() {
        fun found(pattern: String, text: String) = codePoints(text).let { points ->
            Pattern(pattern).findAll(points).map { String(points, it.first, it.last - it.first + 1) }
        }
        assertEquals(listOf("a", "  ", " ", "b"), found("\\s+(?!\\S)|\\s|\\S+", "a   b"))
        assertEquals(listOf("ab", "ab"), found("ab(?=[cd])|ab(?=x)", "abc abd abe"))
        assertEquals(listOf("12", "3"), found("\\d{1,2}", "123"))
        assertEquals(listOf("'S", "'\u017f"), found("(?i:'s)", "it'S it'\u017f"))
        assertEquals(listOf("a", "a"), found("a+?", "aa"))
        assertEquals(emptyList<String>(), found("a++a", "aaa"))
        assertEquals(listOf("xaby"), found("x(?:a|ab)*y", "xaby"))
        assertEquals(listOf("\uD83D\uDE00"), found("[^\\p{L}\\s]", "\uD83D\uDE00 a"))
        val long = "a".repeat(200_000)
        assertEquals(listOf(long), found("\\p{L}+|\\s", long))
    }

    @Test
    fun `patterns that are not supported are refused`() {
        val wrong = listOf("(?<=a)b", "^a", "a$", "[[:alpha:]]", "\\bword", "\\p{Han}", "(a", "a)", "[a", "a**", "(?<n>a)", "\\w+", "[a&&b]", "\\x41", "x{a}")
        for (pattern in wrong) {
            val error = assertFails<InputError>(pattern) { Pattern(pattern) }
            assertTrue(pattern in error.message!!)
        }
    }

    @Test
    fun `broken UTF-8 becomes one mark for each cut character`() {
        fun decoded(vararg bytes: Int) = lenientUtf8(ByteArray(bytes.size) { bytes[it].toByte() })
        assertEquals("a\uFFFD", decoded(0x61, 0xE2, 0x82))
        assertEquals("\uFFFDa", decoded(0xE2, 0x82, 0x61))
        assertEquals("\uFFFD\uFFFD", decoded(0xC0, 0xAF))
        assertEquals("\uFFFD\uFFFD\uFFFD", decoded(0xED, 0xA0, 0x80))
        assertEquals("\uFFFD\uFFFD\uFFFD\uFFFD", decoded(0xF5, 0x80, 0x80, 0x80))
        assertEquals("\u20AC\uD83D\uDE00", decoded(0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80))
    }

    @Test
    fun `a long text takes a moment, not minutes`() {
        val tokenizer = Vectors.tokenizer("tokenizers/sentencepiece.json")
        val text = "a long text without an end ".repeat(20_000)
        val started = System.nanoTime()
        assertTrue(tokenizer.encode(text).size > 100_000)
        assertFalse((System.nanoTime() - started) / 1e9 > 60)
    }
}
