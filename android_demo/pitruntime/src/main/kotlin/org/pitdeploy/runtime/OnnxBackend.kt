package org.pitdeploy.runtime

import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtException
import ai.onnxruntime.OrtSession
import ai.onnxruntime.TensorInfo
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.FloatBuffer
import java.nio.LongBuffer
import org.pitdeploy.core.Bundle
import org.pitdeploy.core.BundleError
import org.pitdeploy.core.DecoderBackend
import org.pitdeploy.core.ModelErrors
import org.pitdeploy.core.checkRewind
import org.pitdeploy.core.checkRoom

/**
 * ONNX Runtime on the CPU, over the graph that `pit-deploy export --to onnx` writes (docs/onnx.md).
 *
 * With the profile `default` keys and values lie in one buffer a layer, which is input and output at once; with `standard`
 * they grow, and each run gives new ones.
 */
class OnnxBackend(private val bundle: Bundle, threads: Int = 0) : DecoderBackend {
    private val manifest = bundle.manifest
    private val environment = OrtEnvironment.getEnvironment().also { it.setTelemetry(false) }
    override val name = "ONNX Runtime ${environment.version}"
    override val contextLength = manifest.contextLength
    override val vocabSize = manifest.vocabSize
    override var position = 0
        private set
    private val session: OrtSession
    private val cache: Cache

    init {
        val model = bundle.modelPath.toString()
        session = try {
            OrtSession.SessionOptions().use { options ->
                if (threads > 0) options.setIntraOpNumThreads(threads)
                // Otherwise a DequantizeLinear before a MatMul would be fused, with its activations rounded to int8.
                options.addConfigEntry("session.qdq_matmulnbits_accuracy_level", "0")
                environment.createSession(model, options)
            }
        } catch (error: OrtException) {
            throw ModelErrors.atLoad(manifest.modelFile, name, error)
        }
        cache = try {
            checkGraph(session, bundle)
            if (manifest.profile == "default") SharedCache() else GrowingCache()
        } catch (error: Throwable) {
            session.close()
            if (error is OutOfMemoryError || error is OrtException) throw ModelErrors.atLoad(manifest.modelFile, name, error)
            throw error
        }
    }

    override fun prefill(ids: IntArray): FloatArray {
        checkRoom(ids)
        try {
            val tokens = LongArray(ids.size) { ids[it].toLong() }
            val mask = LongArray(position + ids.size) { 1 }
            tensor(tokens).use { input ->
                tensor(mask).use { attention ->
                    val logits = cache.run(mapOf(TOKENS to input, MASK to attention), ids.size)
                    position += ids.size
                    return logits
                }
            }
        } catch (error: OrtException) {
            throw ModelErrors.atRun(manifest.modelFile, name, error)
        } catch (error: OutOfMemoryError) {
            throw ModelErrors.atRun(manifest.modelFile, name, error)
        }
    }

    override fun rewind(position: Int) {
        checkRewind(position)
        if (position == this.position) return
        cache.rewind(position)
        this.position = position
    }

    override fun close() {
        cache.close()
        session.close()
    }

    private fun tensor(values: LongArray): OnnxTensor =
        OnnxTensor.createTensor(environment, LongBuffer.wrap(values), longArrayOf(1, values.size.toLong()))

    private interface Cache : AutoCloseable {
        /** Runs [inputs] with the keys and values; logits of the last of [tokens] positions. */
        fun run(inputs: Map<String, OnnxTensor>, tokens: Int): FloatArray

        fun rewind(position: Int)
    }

    /**
     * Tensors that are past and present at once. What lies behind the position is never read.
     *
     * They are the outputs of a first run over one token, because those lie in the runtime's memory: a buffer that is made
     * in Java counts against the app's heap on Android, which a long context would fill.
     */
    private inner class SharedCache : Cache {
        private val first: OrtSession.Result
        private val past: Map<String, OnnxTensor>
        private val outputs: Map<String, OnnxTensor>
        private val logits = floats(manifest.vocabSize.toLong())
        private val logitsTensor = OnnxTensor.createTensor(environment, logits, longArrayOf(1, 1, manifest.vocabSize.toLong()))
        private val result = FloatArray(manifest.vocabSize)

        init {
            try {
                val shape = longArrayOf(1, manifest.keyValueHeads.toLong(), contextLength.toLong(), manifest.headDim.toLong())
                first = OnnxTensor.createTensor(environment, floats(shape.reduce(Long::times)), shape).use { blank ->
                    tensor(longArrayOf(0)).use { token ->
                        tensor(longArrayOf(1)).use { mask ->
                            session.run(manifest.states.associate { it.name to blank } + mapOf(TOKENS to token, MASK to mask))
                        }
                    }
                }
                past = manifest.states.associate { it.name to first.get(it.output!!).get() as OnnxTensor }
                past.entries.firstOrNull { !it.value.info.shape.contentEquals(shape) }?.let {
                    first.close()
                    throw differs(bundle, "its cache ${it.key} has the shape ${it.value.info.shape.toList()}, and not ${shape.toList()}")
                }
                val kept = manifest.states.associate { it.output!! to past.getValue(it.name) }
                outputs = if (manifest.logits == "last") kept + (LOGITS to logitsTensor) else kept
            } catch (error: Throwable) {
                logitsTensor.close()
                throw error
            }
        }

        override fun run(inputs: Map<String, OnnxTensor>, tokens: Int): FloatArray {
            val wanted = if (manifest.logits == "last") emptySet() else setOf(LOGITS)
            session.run(past + inputs, wanted, outputs).use { run ->
                if (manifest.logits == "last") {
                    logits.duplicate().get(result)
                } else {
                    lastRow(run.get(LOGITS).get() as OnnxTensor, tokens, result)
                }
            }
            return result
        }

        override fun rewind(position: Int) = Unit

        override fun close() {
            first.close()
            logitsTensor.close()
        }
    }

    /** Keys and values as each run returns them. */
    private inner class GrowingCache : Cache {
        private var past = empty()
        private val result = FloatArray(manifest.vocabSize)

        override fun run(inputs: Map<String, OnnxTensor>, tokens: Int): FloatArray {
            val run = session.run(past + inputs)
            val next = manifest.states.associate { it.name to run.get(it.output!!).get() as OnnxTensor }
            (run.get(LOGITS).get() as OnnxTensor).use { logits ->
                lastRow(logits, if (manifest.logits == "last") 1 else tokens, result)
            }
            past.values.forEach { it.close() }
            past = next
            return result
        }

        override fun rewind(position: Int) {
            val old = past
            past = if (position == 0) empty() else old.mapValues { front(it.value, position) }
            old.values.forEach { it.close() }
        }

        /** The first [length] rows of each head. */
        private fun front(tensor: OnnxTensor, length: Int): OnnxTensor {
            val heads = manifest.keyValueHeads
            val source = tensor.floatBuffer
            val rows = source.remaining() / heads
            val kept = length * manifest.headDim
            val target = floats(heads.toLong() * kept)
            for (head in 0 until heads) {
                val part = source.duplicate()
                part.position(head * rows)
                part.limit(head * rows + kept)
                target.put(part)
            }
            target.rewind()
            return OnnxTensor.createTensor(environment, target, longArrayOf(1, heads.toLong(), length.toLong(), manifest.headDim.toLong()))
        }

        private fun empty(): Map<String, OnnxTensor> = manifest.states.associate {
            val shape = longArrayOf(1, manifest.keyValueHeads.toLong(), 0, manifest.headDim.toLong())
            it.name to OnnxTensor.createTensor(environment, floats(0), shape)
        }

        override fun close() = past.values.forEach { it.close() }
    }

    private companion object {
        const val TOKENS = "input_ids"
        const val MASK = "attention_mask"
        const val LOGITS = "logits"

        /** A buffer that the runtime reads and writes in place. */
        fun floats(count: Long): FloatBuffer {
            val bytes = count * Float.SIZE_BYTES
            if (bytes > Int.MAX_VALUE) throw OutOfMemoryError("a buffer of $bytes bytes")
            return ByteBuffer.allocateDirect(bytes.toInt()).order(ByteOrder.nativeOrder()).asFloatBuffer()
        }

        fun lastRow(logits: OnnxTensor, rows: Int, into: FloatArray) {
            val buffer = logits.floatBuffer
            buffer.position((rows - 1) * into.size)
            buffer.get(into)
        }

        fun differs(bundle: Bundle, what: String) = BundleError(
            "bad_value",
            "${bundle.modelPath}: $what; export the bundle again, or fetch it again from where it came.",
        )

        /** Room is made by the manifest, so it must not be believed where the graph says otherwise. */
        fun checkGraph(session: OrtSession, bundle: Bundle) {
            val manifest = bundle.manifest
            fun differs(what: String): Nothing = throw differs(bundle, what)
            val inputs = setOf(TOKENS, MASK) + manifest.states.map { it.name }
            if (session.inputNames != inputs) differs("its inputs are not those of the manifest")
            if (!session.outputNames.containsAll(manifest.states.map { it.output } + LOGITS)) differs("it lacks outputs of the manifest")
            for (state in manifest.states) {
                val shape = (session.inputInfo.getValue(state.name).info as TensorInfo).shape
                val wanted = listOf(manifest.keyValueHeads, manifest.headDim).map { it.toLong() }
                if (state.dtype != "float32") differs("its state ${state.name} is of type ${state.dtype}, and this app keeps float32")
                if (shape.size != 4 || listOf(shape[1], shape[3]) != wanted) {
                    differs("its state ${state.name} has the shape ${shape.toList()}, and the manifest says $wanted heads and width")
                }
            }
            val rows = (session.outputInfo.getValue(LOGITS).info as TensorInfo).shape.last()
            if (rows != manifest.vocabSize.toLong()) differs("it has $rows rows, and the manifest says ${manifest.vocabSize}")
            if (manifest.profile !in setOf("default", "standard")) differs("the profile '${manifest.profile}' is not known to this app")
        }
    }
}
