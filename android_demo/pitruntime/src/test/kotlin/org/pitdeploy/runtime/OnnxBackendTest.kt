package org.pitdeploy.runtime

import java.nio.file.Files
import java.nio.file.Path
import java.nio.file.Paths
import org.junit.Assert.assertArrayEquals
import org.junit.Assert.assertEquals
import org.junit.Assert.assertTrue
import org.junit.Assume.assumeTrue
import org.junit.Test
import org.pitdeploy.core.BenchReport
import org.pitdeploy.core.BenchSettings
import org.pitdeploy.core.Benchmark
import org.pitdeploy.core.Bundle
import org.pitdeploy.core.BundleError
import org.pitdeploy.core.Chat
import org.pitdeploy.core.ContextFullError
import org.pitdeploy.core.Gate
import org.pitdeploy.core.GoldenRecord
import org.pitdeploy.core.LoadedModel
import org.pitdeploy.core.ModelError
import org.pitdeploy.core.Parity
import org.pitdeploy.core.SamplingOptions
import org.pitdeploy.core.generate
import org.pitdeploy.core.json.Json

/**
 * The real backend over real bundles, in ONNX Runtime's Android classes on this machine's JVM (tools/onnxruntime_jvm.py).
 * The property `bundles` names folders of bundles; each has an `expected.json` beside it, written by tools/run_bundles.py.
 */
class OnnxBackendTest {
    private val bundles: List<Path> = (System.getProperty("bundles") ?: "").split(":").filter { it.isNotEmpty() }.map { Paths.get(it) }

    private fun each(block: (Bundle, Map<*, *>) -> Unit) {
        assumeTrue("the property bundles is empty: this needs a bundle and gcc (make test-android)", bundles.isNotEmpty())
        for (path in bundles) {
            val expected = Json.parse(Files.readAllBytes(path.resolveSibling("${path.fileName}.expected.json"))) as Map<*, *>
            block(Bundle.open(path, checkHashes = true), expected)
        }
    }

    private fun open(bundle: Bundle) = LoadedModel.open(LoadedModel.prepare(bundle), Backends(threads = 1), null)

    private fun ints(value: Any?) = (value as List<*>).map { (it as Long).toInt() }

    @Test
    fun `greedy and sampled ids are Python's`() = each { bundle, expected ->
        open(bundle).use { model ->
            for (case in expected["generations"] as List<*>) {
                case as Map<*, *>
                val options = SamplingOptions(temperature = (case["temperature"] as Number).toDouble(), topP = (case["top_p"] as Number).toDouble(), seed = 7u)
                val prompt = model.tokenizer.encode(case["prompt"] as String)
                assertEquals(ints(case["prompt_ids"]), prompt.toList())
                model.backend.rewind(0)
                val found = generate(model.backend, prompt, (case["new_tokens"] as Long).toInt(), options, bundle.manifest.endIds)
                assertEquals("${bundle.path}: ${case["prompt"]}", ints(case["ids"]), found.ids)
                assertEquals(case["text"], model.tokenizer.decode(found.ids))
            }
        }
    }

    @Test
    fun `parity has Python's figures`() = each { bundle, expected ->
        val golden = GoldenRecord.parse(bundle.read("golden.json"), bundle.read("golden.safetensors"))
        open(bundle).use { model ->
            val manifest = bundle.manifest
            val report = Parity.check(golden, model.backend, Gate.of(manifest), manifest.endIds)
            val wanted = expected["parity"] as Map<*, *>
            val found = report.toJson()
            println("${bundle.path}: ${found.filterKeys { it != "failures" }} ${report.failures}")
            assertEquals(wanted["passed"], report.passed)
            assertEquals((wanted["top1"] as Number).toDouble(), report.top1, 1e-9)
            val kl = (wanted["mean_kl"] as Number).toDouble()
            assertEquals(kl, report.meanKl, 1e-9 + 1e-4 * kl)
            assertEquals((wanted["max_abs_logit_error"] as Number).toDouble(), report.maxAbs, 1e-4)
            assertEquals((wanted["greedy_equal"] as Long).toInt(), report.greedyEqual)
        }
    }

    @Test
    fun `taking tokens back and running others gives what a fresh cache gives`() = each { bundle, _ ->
        open(bundle).use { model ->
            val backend = model.backend
            val ids = bundle.manifest.tokenizerChecks.first { it.ids.size >= 8 }.ids.copyOf(8)
            val whole = backend.prefill(ids).copyOf()
            backend.rewind(3)
            assertEquals(3, backend.position)
            backend.prefill(ids.copyOfRange(5, 8))
            backend.rewind(3)
            assertArrayEquals(whole, backend.prefill(ids.copyOfRange(3, 8)), 0.05f * whole.maxOf { Math.abs(it) })
            backend.rewind(0)
            assertArrayEquals(whole, backend.prefill(ids), 1e-6f)
        }
    }

    @Test
    fun `a full context is an error before anything runs`() = each { bundle, _ ->
        open(bundle).use { model ->
            val ids = IntArray(bundle.manifest.contextLength + 1) { bundle.manifest.tokenizerChecks[0].ids[0] }
            val error = runCatching { model.backend.prefill(ids) }.exceptionOrNull()
            assertTrue("$error", error is ContextFullError)
            assertEquals(0, model.backend.position)
            assertTrue(runCatching { Chat(model).reply("word ".repeat(bundle.manifest.contextLength), 4) }.exceptionOrNull() is ContextFullError)
        }
    }

    @Test
    fun `a benchmark runs`() = each { bundle, _ ->
        val settings = BenchSettings(threads = 1, promptTokens = listOf(4, 8), depths = listOf(0), newTokens = 4, repeats = 2)
        val figures = Benchmark(settings) { null }.run(BenchReport.ids(bundle, null), { OnnxBackend(bundle, 1) })
        assertEquals(null, figures.error)
        assertEquals(setOf(4, 8), figures.prefill.keys)
    }

    @Test
    fun `models that ONNX Runtime refuses end in one sentence and a reason`() {
        assumeTrue("the property broken is empty", !System.getProperty("broken").isNullOrEmpty())
        val root = Paths.get(System.getProperty("broken"))
        val wanted = Json.parse(Files.readAllBytes(root.resolve("expected.json"))) as Map<*, *>
        for ((name, kind) in wanted) {
            val bundle = Bundle.open(root.resolve(name as String))
            val error = runCatching { OnnxBackend(bundle, 1).close() }.exceptionOrNull()
            if (kind == "bad_value") {
                assertEquals("$name: $error", kind, (error as BundleError).kind)
            } else {
                assertEquals("$name: $error", kind, (error as ModelError).reason.name.lowercase())
            }
            assertTrue(error.message!!, '\n' !in error.message!! && error.message!!.endsWith("."))
        }
    }
}
