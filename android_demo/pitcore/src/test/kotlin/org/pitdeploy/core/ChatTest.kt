package org.pitdeploy.core

import java.nio.file.Files
import java.nio.file.Path
import org.junit.Assert.assertEquals
import org.junit.Assert.assertFalse
import org.junit.Assert.assertNotNull
import org.junit.Assert.assertNull
import org.junit.Assert.assertTrue
import org.junit.Rule
import org.junit.Test
import org.junit.rules.TemporaryFolder
import org.pitdeploy.core.json.Json
import org.pitdeploy.core.json.toJson

class ChatTest {
    @get:Rule
    val temporary = TemporaryFolder()

    private val tokenizer = Vectors.tokenizer("tokenizers/byte_level.json")
    private val end = tokenizer.id("<|end|>")!!

    /** A bundle with the tokenizer of the vectors and a template; the model file is only a name. */
    private fun bundle(context: Int, name: String = "tiny"): Bundle {
        val folder = temporary.newFolder().toPath().resolve(name)
        Files.createDirectories(folder)
        val files = mapOf(
            "model.onnx" to ByteArray(5),
            "tokenizer.json" to Vectors.bytes("tokenizers/byte_level.json"),
            "tokenizer_config.json" to "{\"eos_token\": \"<|end|>\"}".toByteArray(),
            "chat_template.jinja" to Vectors.load("templates.json").part("templates").text("markers").toByteArray(),
        )
        files.forEach { (path, bytes) -> Files.write(folder.resolve(path), bytes) }
        val base = fields(Json.parse(Vectors.bytes("manifests/good_onnx.json")))
        val manifest = base + mapOf(
            "source" to base.part("source") + ("name" to name),
            "vocab_size" to 432L,
            "tokenizer_length" to tokenizer.length.toLong(),
            "context_length" to context.toLong(),
            "bos_id" to null,
            "end_ids" to listOf(end.toLong()),
            "golden" to null,
            "tokenizer_checks" to listOf("The token", "\u65e5\u672c <|end|>").map { text -> mapOf("text" to text, "ids" to tokenizer.encode(text).map { it.toLong() }) },
            "files" to files.keys.sorted().map {
                mapOf("path" to it, "size" to Files.size(folder.resolve(it)), "sha256" to Bundle.sha256(folder.resolve(it)))
            },
        )
        Files.write(folder.resolve("manifest.json"), toJson(manifest).toByteArray())
        return Bundle.open(folder, checkHashes = true)
    }

    private fun holder(memory: Long? = null, open: (Bundle) -> DecoderBackend) = ModelHolder({ open(it) }, { memory })

    private fun answers(vararg texts: String): List<Int> = texts.flatMap { tokenizer.encode(it).toList() + end }

    private fun controller(holder: ModelHolder, states: MutableList<ChatState> = ArrayList()) = ChatController(holder) { states.add(it) }

    private fun ChatController.say(text: String, most: Int = 64) {
        setDraft(text)
        send(most)
    }

    @Test
    fun `turns reuse the cache`() {
        val backend = ScriptedBackend(answers("Hi!", "Fine."), 400, 432)
        val bundle = bundle(400)
        val model = LoadedModel.open(LoadedModel.prepare(bundle), { backend }, null)
        val chat = Chat(model)
        val pieces = ArrayList<String>()
        val first = chat.reply("Hello", 50) { pieces.add(it) }
        assertEquals("Hi!", first.text)
        assertEquals("Hi!", pieces.joinToString(""))
        assertEquals(FinishReason.STOP, first.generation.reason)
        val before = backend.cache.toList()
        assertEquals("Fine.", chat.reply("How are you?", 50).text)
        assertEquals(before, backend.cache.take(before.size))
        val whole = tokenizer.encode(model.template!!.render(chat.messages.dropLast(1))).toList()
        assertEquals("the cache holds the template's ids", whole, backend.cache.take(whole.size))
        val second = backend.asked.first { it.size > 1 && it != backend.asked[0] }
        assertTrue("the first turn is not computed again", second.size < whole.size - before.size + 1)
        assertEquals(listOf("user", "assistant", "user", "assistant"), chat.messages.map { it.role })
    }

    @Test
    fun `an answer can be stopped, and is kept`() {
        val backend = ScriptedBackend(answers("one two three four five six"), 400, 432)
        val states = ArrayList<ChatState>()
        val controller = controller(holder { backend }, states)
        controller.openModel(bundle(400))
        lateinit var stopping: ChatController
        stopping = ChatController(holder { ScriptedBackend(answers("one two three four five six"), 400, 432) }) { if (it.partial.length > 4) stopping.stop() }
        stopping.openModel(bundle(400))
        stopping.say("Count")
        val answer = stopping.state.messages.last()
        assertEquals("assistant", answer.role)
        assertTrue(answer.content, answer.content.length in 5..20)
        assertFalse(stopping.state.running)
        controller.say("Count")
        assertEquals("one two three four five six", controller.state.messages.last().content)
        assertTrue("it streams", states.map { it.partial }.filter { it.isNotEmpty() }.distinct().size > 5)
    }

    @Test
    fun `a message that does not fit offers a new chat and is not lost`() {
        val prompt = tokenizer.encode(ChatTemplate.of(bundle(400))!!.render(listOf(Message("user", "Hello")))).size
        val context = prompt + 12
        val backend = ScriptedBackend(answers("Hi!", "New."), context, 432)
        val controller = controller(holder { backend })
        controller.openModel(bundle(context))
        controller.say("Hello")
        assertEquals("Hi!", controller.state.messages.last().content)
        assertFalse(controller.state.offerNewChat)
        val runs = backend.runs
        controller.say("A second message that is far too long for the room that is left")
        val state = controller.state
        assertTrue(state.offerNewChat)
        assertSentence(state.error!!)
        assertTrue(state.error, "$context" in state.error && "start a new chat" in state.error)
        assertEquals("the model did not run", runs, backend.runs)
        assertEquals("A second message that is far too long for the room that is left", state.draft)
        assertEquals(listOf("Hello", "Hi!"), state.messages.map { it.content })
        controller.newChat()
        assertEquals(state.draft, controller.state.draft)
        assertFalse(controller.state.offerNewChat)
        controller.say("Hello")
        assertEquals(listOf("Hello", "New."), controller.state.messages.map { it.content })
    }

    @Test
    fun `an answer that fills the context is kept and says so`() {
        val prompt = tokenizer.encode(ChatTemplate.of(bundle(400))!!.render(listOf(Message("user", "Hello")))).size
        val controller = controller(holder { ScriptedBackend(answers("one two three four"), prompt + 3, 432) })
        controller.openModel(bundle(prompt + 3))
        controller.say("Hello")
        val state = controller.state
        assertTrue(state.offerNewChat)
        assertSentence(state.error!!)
        assertTrue(state.messages.last().content.isNotEmpty())
        assertEquals(prompt + 3, state.used)
    }

    @Test
    fun `a failed load keeps the model and the chat of before`() {
        val opened = ArrayList<ScriptedBackend>()
        val holder = holder { bundle ->
            if (bundle.manifest.sourceName == "large") throw ModelErrors.atLoad("large", "ONNX Runtime", OutOfMemoryError("Failed to allocate a 400000012 byte allocation"))
            // The reopened model answers what a fresh one would: the second turn is run with the whole chat.
            ScriptedBackend(if (opened.isEmpty()) answers("Hi!") else answers("Again."), 400, 432).also { opened.add(it) }
        }
        val controller = controller(holder)
        controller.openModel(bundle(400))
        controller.say("Hello")
        controller.setDraft("unsent")
        controller.openModel(bundle(400, "large"))
        val state = controller.state
        assertSentence(state.error!!)
        assertTrue(state.error, "not enough memory for large" in state.error)
        assertEquals(listOf("Hello", "Hi!"), state.messages.map { it.content })
        assertEquals("unsent", state.draft)
        assertTrue("the old model was closed before the new one was tried", opened[0].closed)
        assertEquals(2, opened.size)
        controller.send(64)
        assertEquals(listOf("Hello", "Hi!", "unsent", "Again."), controller.state.messages.map { it.content })
        assertTrue(controller.state.model!!.startsWith("tiny"))
    }

    @Test
    fun `the chat goes on after the model was used for something else, or opened again`() {
        val opened = ArrayList<ScriptedBackend>()
        val controller = controller(holder { ScriptedBackend(if (opened.isEmpty()) answers("Hi!", "Two.") else answers("Three."), 400, 432).also { opened.add(it) } })
        val bundle = bundle(400)
        controller.openModel(bundle)
        controller.say("Hello")
        opened[0].rewind(0)
        controller.cacheWasUsed()
        controller.say("More")
        assertEquals(listOf("Hello", "Hi!", "More", "Two."), controller.state.messages.map { it.content })
        val asked = ChatTemplate.of(bundle)!!.render(controller.state.messages.dropLast(1))
        assertEquals("the whole chat was run again", tokenizer.encode(asked).toList(), opened[0].asked.last { it.size > 1 })

        controller.closeModel()
        assertTrue(opened[0].closed)
        assertEquals(4, controller.state.messages.size)
        controller.say("Nobody there")
        assertSentence(controller.state.error!!)
        controller.openModel(bundle)
        assertEquals(4, controller.state.messages.size)
        controller.say("Again")
        assertEquals(listOf("Again", "Three."), controller.state.messages.takeLast(2).map { it.content })
        assertEquals(6, controller.state.messages.size)
        controller.openModel(bundle(400, "other"))
        assertEquals("another model starts anew", emptyList<Message>(), controller.state.messages)
    }

    @Test
    fun `too little memory is told before the runtime is asked, with both numbers`() {
        val bundle = bundle(400)
        val needed = LoadedModel.neededBytes(bundle)
        val holder = holder(memory = needed - 1) { throw AssertionError("opened") }
        val error = assertFails<ModelError>("memory") { holder.switchTo(bundle) }
        assertEquals(ModelError.Reason.OUT_OF_MEMORY, error.reason)
        assertTrue(error.message!!, "MB are free" in error.message!!)
        assertNull(holder.current)
        assertNotNull(ModelHolder({ ScriptedBackend(emptyList(), 400, 432) }, { needed }).switchTo(bundle))
        val thrown = holder { throw OutOfMemoryError("Java heap space") }
        assertEquals(ModelError.Reason.OUT_OF_MEMORY, assertFails<ModelError>("heap") { thrown.switchTo(bundle) }.reason)
    }

    @Test
    fun `a model that is not the manifest's is closed again`() {
        val backend = ScriptedBackend(emptyList(), 399, 432)
        val error = assertFails<BundleError>("context") { holder { backend }.switchTo(bundle(400)) }
        assertEquals("bad_value", error.kind)
        assertTrue(backend.closed)
    }

    @Test
    fun `a tokenizer with other ids is refused before the model is opened`() {
        val bundle = bundle(400)
        val changed = String(Files.readAllBytes(bundle.path.resolve("manifest.json"))).replaceFirst(Regex("(\"text\":\"The token\",\"ids\":\\[)\\d+"), "$11")
        Files.write(bundle.path.resolve("manifest.json"), changed.toByteArray())
        val error = assertFails<BundleError>("tokenizer") { holder { throw AssertionError("opened") }.switchTo(Bundle.open(bundle.path)) }
        assertEquals("tokenizer_mismatch", error.kind)
    }

    @Test
    fun `a run that fails leaves the chat as it was`() {
        var fail = true
        val inner = ScriptedBackend(answers("Hi!"), 400, 432)
        val backend = object : DecoderBackend by inner {
            override fun prefill(ids: IntArray): FloatArray {
                if (fail) throw ModelErrors.atRun("tiny", "ONNX Runtime", RuntimeException("some kernel failed"))
                return inner.prefill(ids)
            }

            override fun decode(id: Int): FloatArray = inner.decode(id)
        }
        val controller = controller(holder { backend })
        controller.openModel(bundle(400))
        controller.say("Hello")
        assertSentence(controller.state.error!!)
        assertEquals("Hello", controller.state.draft)
        assertEquals(emptyList<Message>(), controller.state.messages)
        fail = false
        controller.send()
        assertEquals("Hi!", controller.state.messages.last().content)
        assertNull(controller.state.error)
    }

    @Test
    fun `without a model or a message a sentence says what to do`() {
        val controller = controller(holder { ScriptedBackend(emptyList(), 400, 432) })
        controller.say("Hello")
        assertSentence(controller.state.error!!)
        assertEquals("Hello", controller.state.draft)
        controller.openModel(bundle(400))
        controller.say("  ")
        assertSentence(controller.state.error!!)
        controller.dismissError()
        assertNull(controller.state.error)
    }

    @Test
    fun `what ONNX Runtime says becomes one sentence with a reason`() {
        val document = Vectors.load("onnx_load_errors.json")
        for (case in document.cases("cases")) {
            val error = ModelErrors.atLoad("model.onnx", "ONNX Runtime 1.32", RuntimeException(case.text("message")))
            assertEquals(case.text("name"), case.text("kind"), error.reason.name.lowercase())
            assertSentence(error.message!!)
            assertFalse(error.message!!, "ONNXRuntimeError" in error.message!! || "onnxruntime_src" in error.message!!)
        }
        // The words of org.pytorch.executorch.ExecutorchRuntimeException.
        val executorch = mapOf(
            "[Executorch Error 0x14] Operator missing: Failed to load method\n Detailed logs:\nkernel llama::custom_sdpa not found\n" to "UNSUPPORTED_OPERATORS",
            "[Executorch Error 0x30] Delegate invalid compatibility: forward" to "UNSUPPORTED_VERSION",
            "[Executorch Error 0x23] Invalid program: model.pte" to "DAMAGED_MODEL",
            "[Executorch Error 0x21] Memory allocation failed: model.pte" to "OUT_OF_MEMORY",
            "[Executorch Error 0x12] Invalid argument: model.pte" to "OTHER",
        )
        for ((message, reason) in executorch) {
            val error = ModelErrors.atLoad("model.pte", "ExecuTorch", RuntimeException(message))
            assertEquals(message, reason, error.reason.name)
            assertSentence(error.message!!)
            assertFalse(error.message!!, "0x" in error.message!! || "logs" in error.message!!)
        }
        val unknown = ModelErrors.atLoad("model.onnx", "ONNX Runtime 1.32", RuntimeException("Fatal error: com.microsoft:NoSuchAttention(-1) is not a registered function/op"))
        assertTrue(unknown.message!!, "com.microsoft:NoSuchAttention" in unknown.message!!)
        val newer = ModelErrors.atLoad("model.onnx", "ONNX Runtime 1.32", RuntimeException("Opset 99 is under development and support for this is limited."))
        assertTrue(newer.message!!, "Opset 99" in newer.message!! && "update the app" in newer.message!!)
    }
}
