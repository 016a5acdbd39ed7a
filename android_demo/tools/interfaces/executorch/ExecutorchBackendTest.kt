package org.pitdeploy.runtime

import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.file.Files
import java.nio.file.Path
import java.nio.file.Paths
import java.util.Base64
import org.junit.After
import org.junit.Assert.assertEquals
import org.junit.Assert.assertTrue
import org.junit.Rule
import org.junit.Test
import org.junit.rules.TemporaryFolder
import org.pitdeploy.core.Bundle
import org.pitdeploy.core.BundleError
import org.pitdeploy.core.ContextFullError
import org.pitdeploy.core.InputError
import org.pitdeploy.core.ModelError
import org.pitdeploy.core.SamplingOptions
import org.pitdeploy.core.generate
import org.pitdeploy.core.json.Json
import org.pitdeploy.core.json.toJson
import org.pytorch.executorch.EValue
import org.pytorch.executorch.Module
import org.pytorch.executorch.Tensor

/** The backend's own logic, over a program of recorded logits (generation.json). It says nothing of ExecuTorch itself. */
class ExecutorchBackendTest {
    @get:Rule
    val temporary = TemporaryFolder()

    private val vectors: Path = Paths.get(System.getProperty("vectors"))
    private val document = Json.parse(Files.readAllBytes(vectors.resolve("generation.json"))) as Map<*, *>
    private val case = (document["cases"] as List<*>).map { it as Map<*, *> }.first { it["name"] == "greedy" }
    private val rows = int(case["vocab_size"])
    private val context = int(case["context_length"])

    private fun int(value: Any?) = (value as Long).toInt()

    private fun ints(value: Any?) = (value as List<*>).map { int(it) }

    @After
    fun close() {
        Module.opener = null
    }

    /** Keeps its cache as an exported program does: what lies behind `input_pos` is written over. */
    private inner class Program(private val contextLength: Int, private val everyPosition: Boolean) : Module() {
        private val runs = (case["runs"] as List<*>).map { it as Map<*, *> }
        val cache = ArrayList<Int>()
        var destroyed = false
        var fail: RuntimeException? = null

        override fun execute(method: String, vararg inputs: EValue): Array<EValue> {
            fail?.let { throw it }
            if (method == "get_vocab_size") return arrayOf(EValue.from(rows.toLong()))
            if (method == "get_max_context_len") return arrayOf(EValue.from(contextLength.toLong()))
            assertEquals("forward", method)
            val tokens = inputs[0].toTensor().dataAsLongArray.map { it.toInt() }
            val position = inputs[1].toTensor().dataAsLongArray.single().toInt()
            while (cache.size > position) cache.removeAt(cache.size - 1)
            assertEquals("a gap in the cache", position, cache.size)
            val run = runs.first { ints(it["cached"]) == cache && ints(it["new"]) == tokens }
            cache.addAll(tokens)
            val buffer = ByteBuffer.wrap(Base64.getDecoder().decode(run["logits"] as String)).order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer()
            val last = FloatArray(rows).also { buffer.get(it) }
            val all = if (everyPosition) FloatArray(rows * (tokens.size - 1)) + last else last
            return arrayOf(EValue.from(Tensor.fromBlob(all, longArrayOf(1, all.size.toLong() / rows, rows.toLong()))))
        }

        override fun destroy() {
            destroyed = true
        }
    }

    private fun bundle(): Bundle {
        val folder = Paths.get(temporary.newFolder().path)
        val base = Json.parse(Files.readAllBytes(vectors.resolve("manifests/good_onnx.json"))) as Map<*, *>
        Files.write(folder.resolve("model.pte"), ByteArray(3))
        val file = mapOf("path" to "model.pte", "size" to 3L, "sha256" to Bundle.sha256(folder.resolve("model.pte")))
        val manifest = base + mapOf(
            "runtime" to "executorch", "model_file" to "model.pte", "golden" to null, "files" to listOf(file), "tokenizer_length" to rows.toLong(),
            "vocab_size" to rows.toLong(), "context_length" to context.toLong(), "end_ids" to case["stop_ids"],
        )
        Files.write(folder.resolve("manifest.json"), toJson(manifest).toByteArray())
        return Bundle.open(folder)
    }

    private fun open(program: Program) = Backends().run {
        Module.opener = java.util.function.Function { program }
        open(bundle())
    }

    @Test
    fun `generations go through, with the logits of the last position or of all`() {
        val turn = (case["turns"] as List<*>).single() as Map<*, *>
        for (everyPosition in listOf(false, true)) {
            val program = Program(context, everyPosition)
            open(program).use { backend ->
                val prompt = ints(turn["prompt_ids"]).toIntArray()
                repeat(2) {
                    val found = generate(backend, prompt, int(case["max_new_tokens"]), SamplingOptions(), ints(case["stop_ids"]))
                    assertEquals(ints((turn["expected"] as Map<*, *>)["ids"]), found.ids)
                    backend.rewind(0)
                }
            }
            assertTrue(program.destroyed)
        }
    }

    @Test
    fun `places in the cache are counted`() {
        open(Program(context, false)).use { backend ->
            val first = case["runs"].let { (it as List<*>)[0] as Map<*, *> }
            backend.prefill(ints(first["new"]).toIntArray())
            assertEquals(ints(first["new"]).size, backend.position)
            assertTrue(runCatching { backend.prefill(IntArray(context)) }.exceptionOrNull() is ContextFullError)
            assertTrue(runCatching { backend.rewind(context) }.exceptionOrNull() is InputError)
            assertEquals(ints(first["new"]).size, backend.position)
        }
    }

    @Test
    fun `a program that is not the manifest's is closed again`() {
        val program = Program(context + 1, false)
        val error = runCatching { open(program) }.exceptionOrNull()
        assertEquals("bad_value", (error as BundleError).kind)
        assertTrue(program.destroyed)
    }

    @Test
    fun `what ExecuTorch throws becomes one sentence`() {
        Module.opener = java.util.function.Function { throw IllegalStateException("[Executorch Error 0x23] Invalid program: model.pte") }
        val load = runCatching { Backends().open(bundle()) }.exceptionOrNull() as ModelError
        assertEquals(ModelError.Reason.DAMAGED_MODEL, load.reason)
        Module.opener = java.util.function.Function { throw UnsatisfiedLinkError("libexecutorch.so is not there") }
        assertTrue(runCatching { Backends().open(bundle()) }.exceptionOrNull() is ModelError)
        val program = Program(context, false)
        open(program).use { backend ->
            program.fail = IllegalStateException("[Executorch Error 0x21] Memory allocation failed: forward")
            val run = runCatching { backend.prefill(intArrayOf(1)) }.exceptionOrNull() as ModelError
            assertEquals(ModelError.Reason.OUT_OF_MEMORY, run.reason)
            assertEquals("a run that failed appends nothing", 0, backend.position)
        }
    }

    @Test
    fun `a bundle for another system is refused`() {
        val folder = Paths.get(temporary.newFolder().path)
        val index = Json.parse(Files.readAllBytes(vectors.resolve("manifests/index.json"))) as Map<*, *>
        val good = (index["cases"] as List<*>).map { it as Map<*, *> }.first { it["name"] == "good_coreml" }
        Files.write(folder.resolve("manifest.json"), Files.readAllBytes(vectors.resolve("manifests/good_coreml.json")))
        for (file in good["files"] as List<*>) {
            val path = folder.resolve((file as Map<*, *>)["path"] as String)
            Files.createDirectories(path.parent)
            Files.write(path, (file["text"] as String).toByteArray())
        }
        val error = runCatching { Backends().open(Bundle.open(folder)) }.exceptionOrNull()
        assertTrue("$error", error is InputError && "coreml" in error.message!!)
    }
}
