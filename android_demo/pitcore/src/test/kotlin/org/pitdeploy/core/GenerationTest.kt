package org.pitdeploy.core

import org.junit.Assert.assertEquals
import org.junit.Assert.assertTrue
import org.junit.Test
import org.pitdeploy.core.tokenizer.TextStream

class GenerationTest {
    @Test
    fun `stop rules`() {
        for (case in Vectors.load("stop.json").cases("loops")) {
            val name = case.text("name")
            val backend = ScriptedBackend(case.ints("draws"), case.int("context_length"), 32, case.int("position"))
            val given = ArrayList<Int>()
            val cancelAfter = case["cancel_after"] as Long?
            fun run() = generate(
                backend,
                IntArray(case.int("prompt_tokens")) { 3 },
                case.int("max_new_tokens"),
                SamplingOptions(),
                case.ints("stop_ids"),
            ) {
                given.add(it)
                given.size.toLong() != cancelAfter
            }
            val expected = case.part("expected")
            if ("error" in expected) {
                if (expected["error"] == "context_full") assertFails<ContextFullError>(name) { run() } else assertFails<InputError>(name) { run() }
                assertEquals(name, 0, backend.runs)
                continue
            }
            val found = run()
            assertEquals(name, expected.ints("ids"), found.ids)
            assertEquals(name, expected.ints("ids"), given)
            assertEquals(name, expected.text("finish_reason"), found.reason.word)
            assertEquals(name, (expected["stop_id"] as Long?)?.toInt(), found.stopId)
            assertEquals(name, expected.int("runs"), backend.runs)
            assertEquals(name, expected.int("position"), backend.position)
            assertEquals(name, expected.ints("pending_ids"), found.pendingIds)
        }
    }

    @Test
    fun `recorded generations give Python's ids and text, greedy and with a seed`() {
        val document = Vectors.load("generation.json")
        val tokenizer = Vectors.tokenizer(document.text("tokenizer"))
        val template = ChatTemplate(Vectors.load("templates.json").part("templates").text(document.text("template")), emptyMap())
        var sampled = 0
        for (case in document.cases("cases")) {
            val name = case.text("name")
            val backend = RecordedBackend(case.cases("runs"), case.int("context_length"), case.int("vocab_size"))
            val options = case.part("options").samplingOptions()
            if (options.temperature > 0) sampled++
            val history = ArrayList<Int>()
            var pending = emptyList<Int>()
            for (turn in case.cases("turns")) {
                val text = turn.text("text")
                (case["messages"] as List<*>?)?.let { messages ->
                    val chat = messages.map { fields(it) }.map { Message(it.text("role"), it.text("content")) }
                    assertEquals(name, text, template.render(chat))
                }
                val prompt = pending.toIntArray() + tokenizer.encode(text)
                assertEquals(name, turn.ints("prompt_ids"), prompt.toList())
                val stream = TextStream(tokenizer)
                val pieces = ArrayList<String>()
                val found = generate(backend, prompt, case.int("max_new_tokens"), options, case.ints("stop_ids"), history) {
                    pieces.add(stream.push(it))
                    true
                }
                pieces.add(stream.finish())
                val expected = turn.part("expected")
                assertEquals(name, expected.ints("ids"), found.ids)
                assertEquals(name, expected.text("finish_reason"), found.reason.word)
                assertEquals(name, (expected["stop_id"] as Long?)?.toInt(), found.stopId)
                assertEquals(name, expected.ints("pending_ids"), found.pendingIds)
                assertEquals(name, expected.int("position"), backend.position)
                assertEquals(name, expected.list("pieces"), pieces)
                history.addAll(prompt.asList() + found.ids)
                pending = found.pendingIds
            }
            assertEquals("$name: runs that were not asked for", case.cases("runs").size, backend.runs)
        }
        assertTrue(sampled >= 3)
    }

    @Test
    fun `the error of a full context has its numbers`() {
        val backend = ScriptedBackend(listOf(1), 16, 32, start = 10)
        val error = assertFails<ContextFullError>("full") { generate(backend, IntArray(7), 1, SamplingOptions(), emptyList()) }
        assertEquals(listOf(10, 7, 16), listOf(error.used, error.needed, error.contextLength))
        assertTrue("start a new chat" in error.message!!)
    }

    @Test
    fun `an id outside the vocabulary is refused before anything runs`() {
        val backend = ScriptedBackend(listOf(1), 16, 32)
        assertFails<InputError>("id") { generate(backend, intArrayOf(1, 32), 1, SamplingOptions(), emptyList()) }
        assertFails<InputError>("count") { generate(backend, intArrayOf(1), -1, SamplingOptions(), emptyList()) }
        assertEquals(0, backend.runs)
    }
}
