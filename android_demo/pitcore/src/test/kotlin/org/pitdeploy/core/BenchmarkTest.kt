package org.pitdeploy.core

import java.nio.file.Files
import java.nio.file.Paths
import org.junit.Assert.assertEquals
import org.junit.Assert.assertNotNull
import org.junit.Assert.assertNull
import org.junit.Assert.assertTrue
import org.junit.Rule
import org.junit.Test
import org.junit.rules.TemporaryFolder
import org.pitdeploy.core.json.Json
import org.pitdeploy.core.json.toJson

class BenchmarkTest {
    @get:Rule
    val temporary = TemporaryFolder()

    private fun same(name: String, expected: Any?, found: Any?) {
        when (expected) {
            is Map<*, *> -> {
                assertEquals(name, expected.keys, (found as Map<*, *>).keys)
                expected.forEach { (key, value) -> same("$name.$key", value, found[key]) }
            }
            is List<*> -> {
                assertEquals(name, expected.size, (found as List<*>).size)
                expected.forEachIndexed { i, value -> same("$name.$i", value, found[i]) }
            }
            is Number -> assertEquals(name, expected.toDouble(), (found as Number).toDouble(), 1e-9 * Math.abs(expected.toDouble()))
            else -> assertEquals(name, expected, found)
        }
    }

    @Test
    fun `statistics and entries of a run`() {
        val document = Vectors.load("bench.json")
        for (case in document.cases("statistics")) {
            same("statistics", case["expected"], samples(case.list("samples").map { number(it) }))
        }
        for (case in document.cases("runs")) {
            fun seconds(what: String, size: String) =
                case.part("seconds").cases(what).associate { it.int(size) to it.list("samples").map { s -> number(s) } }
            val expected = case.part("expected")
            same("prefill", expected["prefill"], BenchReport.prefill(seconds("prefill", "tokens")))
            same("decode", expected["decode"], BenchReport.decode(seconds("decode", "depth"), case.int("new_tokens")))
        }
    }

    private fun bundle(): Bundle {
        val folder = temporary.newFolder().toPath().resolve("tiny-onnx")
        Files.createDirectories(folder)
        val case = fields(Json.parse(Vectors.bytes("manifests/index.json"))).cases("cases").first { it["name"] == "good_onnx" }
        Files.write(folder.resolve("manifest.json"), Vectors.bytes("manifests/good_onnx.json"))
        for (file in case.cases("files")) Files.write(folder.resolve(file.text("path")), file.text("text").toByteArray())
        return Bundle.open(folder)
    }

    /** Wants id 1 for ever. */
    private fun endless(context: Int) = ScriptedBackend(List(100_000) { 1 }, context, 8)

    @Test
    fun `a benchmark measures each figure as often as asked`() {
        val settings = BenchSettings(threads = 2, promptTokens = listOf(4, 16, 99), depths = listOf(0, 8, 60), newTokens = 6, repeats = 3)
        val memory = MemoryUse(100, 60, 140)
        val backend = endless(64)
        val figures = Benchmark(settings) { memory }.run(intArrayOf(1, 2, 3), { backend })
        assertNull(figures.error)
        assertEquals(listOf(4, 16), figures.prefill.keys.toList())
        assertEquals(listOf(0, 8), figures.decode.keys.toList())
        assertTrue((figures.prefill.values + figures.decode.values).all { it.size == 3 && it.all { s -> s > 0 } })
        assertEquals("99 tokens and depth 60 do not fit", 2, figures.notes.size)
        assertTrue(backend.closed)
        assertEquals("each run begins with an empty cache", 0, backend.asked.count { it.size > 16 })
        assertNotNull(figures.firstTokenSeconds)

        val report = BenchReport.of(bundle(), "ONNX Runtime 1.32.0", Machine("Android 14", "arm64-v8a", "Pixel", 8, 8L shl 30), settings, figures)
        val text = toJson(report, 1)
        same("what was written is what is read", Json.parse(toJson(report)), Json.parse(text))
        // The test runner validates this file by the schema of pit_deploy.
        System.getProperty("results")?.takeIf { it.isNotEmpty() }?.let { Files.write(Paths.get(it), text.toByteArray()) }
    }

    @Test
    fun `what fails is in the report, and the rest stays`() {
        val settings = BenchSettings(threads = 1, promptTokens = listOf(4), depths = listOf(0), newTokens = 2, repeats = 2)
        val failed = Benchmark(settings) { null }.run(intArrayOf(1), { throw ModelErrors.outOfMemory("m", null, null) })
        assertTrue("memory" in failed.error!!)
        val stopped = Benchmark(settings) { null }.run(intArrayOf(1), { endless(64) }) { done, _ -> done < 2 }
        assertTrue("stopped" in stopped.error!!)
        assertEquals(1, stopped.prefill.getValue(4).size)
        val report = BenchReport.of(bundle(), "r", Machine("s", "a", null, null, null), settings, failed)
        val run = fields(fields((report.getValue("subjects") as List<*>)[0]).cases("runs")[0])
        assertNull(run["load"])
        assertNull(run["memory"])
        assertEquals(failed.error, run["error"])
    }

    @Test
    fun `ids come from the golden record or the tokenizer's checks`() {
        val bundle = bundle()
        assertEquals(bundle.manifest.tokenizerChecks.flatMap { it.ids.asList() }, BenchReport.ids(bundle, null).toList())
        val golden = GoldenRecord.parse(Vectors.bytes("golden/golden.json"), Vectors.bytes("golden/golden.safetensors"))
        assertEquals(golden.positions, BenchReport.ids(bundle, golden).size)
    }
}
