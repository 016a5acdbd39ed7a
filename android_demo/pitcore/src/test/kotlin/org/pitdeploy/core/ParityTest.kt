package org.pitdeploy.core

import org.junit.Assert.assertEquals
import org.junit.Assert.assertTrue
import org.junit.Test

class ParityTest {
    private val document = Vectors.load("parity.json")
    private val folder = document.text("golden")
    private val golden = GoldenRecord.parse(Vectors.bytes("$folder/golden.json"), Vectors.bytes("$folder/golden.safetensors"))

    private fun assertNear(name: String, expected: Any?, found: Double) {
        val wanted = number(expected)
        if (wanted.isNaN()) assertTrue("$name: $found", found.isNaN()) else assertEquals(name, wanted, found, 1e-9 + 1e-6 * Math.abs(wanted))
    }

    @Test
    fun `single positions`() {
        for (case in document.cases("positions")) {
            val name = case.text("name")
            val found = Parity.compare(golden, case.int("position"), decodeLogits(case.text("logits")))
            val expected = case.part("expected")
            assertNear("$name, KL", expected["kl"], found.kl)
            assertNear("$name, error", expected["max_abs"], found.maxAbs)
            assertEquals(name, expected["top1"], found.top1)
        }
    }

    @Test
    fun `whole reports`() {
        for (case in document.cases("reports")) {
            val name = case.text("name")
            val runs = document.part("artifacts").cases(case.text("artifact"))
            val backend = RecordedBackend(runs, document.int("context_length"), golden.vocabSize)
            val gate = Gate.of(case.text("runtime"), case.text("weights"), case.text("tables"))
            val report = Parity.check(golden, backend, gate, document.ints("end_ids"))
            val expected = case.part("expected")
            val found = report.toJson()
            for (key in listOf("max_abs_logit_error", "mean_kl", "worst_kl", "top1", "one_pass_against_steps_max_abs")) {
                assertNear("$name, $key", expected[key], found[key] as Double)
            }
            for (key in listOf("positions", "greedy_tokens", "greedy_equal")) assertEquals("$name, $key", expected.int(key), found[key])
            assertEquals(name, expected["passed"], report.passed)
            assertEquals("$name: ${report.failures}", expected.int("failures"), report.failures.size)
            report.failures.forEach { assertSentence(it) }
            assertEquals("the cache is left empty", 0, backend.position)
        }
    }

    @Test
    fun `gates are those of Python`() {
        for (case in document.cases("gates")) {
            val found = Gate.of(case.text("runtime"), case.text("precision"), case.text("precision"))
            val expected = Gate((case["max_abs"] as Number?)?.toDouble(), case.number("mean_kl"), case.number("top1"), case["greedy"] as Boolean, case.number("layer"))
            assertEquals("${case["runtime"]} ${case["precision"]}", expected, found)
        }
        assertEquals(document["nested_head_room"], listOf(Gate.NESTED_HEAD_ROOM, Gate.NESTED_HEAD_MOST))
        val int8 = Gate.of("onnx", "int8", "int8")
        assertEquals(int8.copy(meanKl = 5e-3 + 2 * 0.03), Gate.of("onnx", "int8", "int8", nestedKl = 0.03))
        assertEquals(int8.copy(meanKl = 5e-3 + 0.1), Gate.of("onnx", "int8", "int8", nestedKl = 100.0))
        assertEquals(Gate.of("onnx", "int4", "int4"), Gate.of("onnx", "int4", "int8"))
        assertEquals(Gate.of("onnx", "fp16", "fp16"), Gate.of("onnx", "fp32", "fp16"))
    }

    @Test
    fun `a check can be stopped, and refuses another model`() {
        val runs = document.part("artifacts").cases("fp32")
        val gate = Gate.of("onnx", "fp32", "fp32")
        val backend = RecordedBackend(runs, document.int("context_length"), golden.vocabSize)
        assertFails<InputError>("stopped") { Parity.check(golden, backend, gate, emptyList()) { done, _ -> done < 3 } }
        assertEquals(0, backend.position)
        val short = RecordedBackend(runs, 4, golden.vocabSize)
        assertTrue("4" in assertFails<InputError>("short") { Parity.check(golden, short, gate, emptyList()) }.message!!)
        val other = RecordedBackend(runs, document.int("context_length"), golden.vocabSize + 1)
        assertFails<InputError>("vocabulary") { Parity.check(golden, other, gate, emptyList()) }
    }

    @Test
    fun `a damaged record is refused`() {
        val json = Vectors.bytes("$folder/golden.json")
        val tensors = Vectors.bytes("$folder/golden.safetensors")
        fun changed(from: String, to: String) = String(json).replaceFirst(from, to).toByteArray()
        assertFails<InputError>("cut") { GoldenRecord.parse(json, tensors.copyOf(tensors.size - 4)) }
        assertFails<InputError>("empty") { GoldenRecord.parse(json, ByteArray(0)) }
        assertFails<InputError>("JSON") { GoldenRecord.parse(json.copyOf(100), tensors) }
        assertFails<InputError>("prompts") { GoldenRecord.parse(changed("\"prompts\"", "\"other\""), tensors) }
        assertFails<InputError>("vocabulary") { GoldenRecord.parse(changed("\"vocab_size\": ${golden.vocabSize}", "\"vocab_size\": 3"), tensors) }
        val newer = assertFails<InputError>("newer") { GoldenRecord.parse(changed("\"golden_version\": 1", "\"golden_version\": 2"), tensors) }
        assertTrue("update the app" in newer.message!!)
    }
}
