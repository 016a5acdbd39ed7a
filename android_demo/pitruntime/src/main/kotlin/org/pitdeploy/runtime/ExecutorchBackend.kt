package org.pitdeploy.runtime

import org.pitdeploy.core.Bundle
import org.pitdeploy.core.BundleError
import org.pitdeploy.core.DecoderBackend
import org.pitdeploy.core.ModelErrors
import org.pitdeploy.core.checkRewind
import org.pitdeploy.core.checkRoom
import org.pytorch.executorch.EValue
import org.pytorch.executorch.Module
import org.pytorch.executorch.Tensor

/**
 * ExecuTorch, over the program that `pit-deploy export --to executorch` writes (docs/executorch.md). The program keeps
 * its cache itself; what lies behind the position is never read.
 */
class ExecutorchBackend(private val bundle: Bundle, threads: Int = 0) : DecoderBackend {
    private val manifest = bundle.manifest
    override val name = "ExecuTorch"
    override val contextLength = manifest.contextLength
    override val vocabSize = manifest.vocabSize
    override var position = 0
        private set
    private val module: Module

    init {
        module = guarded({ ModelErrors.atLoad(manifest.modelFile, name, it) }) {
            Module.load(bundle.modelPath.toString(), Module.LOAD_MODE_MMAP, threads)
        }
        try {
            checkProgram()
        } catch (error: Throwable) {
            module.destroy()
            throw error
        }
    }

    override fun prefill(ids: IntArray): FloatArray {
        checkRoom(ids)
        val tokens = LongArray(ids.size) { ids[it].toLong() }
        val logits = guarded({ ModelErrors.atRun(manifest.modelFile, name, it) }) {
            val input = EValue.from(Tensor.fromBlob(tokens, longArrayOf(1, tokens.size.toLong())))
            val at = EValue.from(Tensor.fromBlob(longArrayOf(position.toLong()), longArrayOf(1)))
            module.execute(METHOD, input, at)[0].toTensor().dataAsFloatArray
        }
        position += ids.size
        return if (logits.size == vocabSize) logits else logits.copyOfRange(logits.size - vocabSize, logits.size)
    }

    override fun rewind(position: Int) {
        checkRewind(position)
        this.position = position
    }

    override fun close() = module.destroy()

    private fun checkProgram() {
        val found = mapOf("get_vocab_size" to manifest.vocabSize, "get_max_context_len" to manifest.contextLength)
        for ((method, wanted) in found) {
            val value = guarded({ ModelErrors.atLoad(manifest.modelFile, name, it) }) { module.execute(method)[0].toInt() }
            if (value != wanted.toLong()) {
                throw BundleError(
                    "bad_value",
                    "${bundle.modelPath}: $method is $value, and the manifest says $wanted; export the bundle again, or fetch it " +
                        "again from where it came.",
                )
            }
        }
    }

    /** ExecuTorch throws exceptions of its own kind, and Java's where its library cannot be loaded. */
    private fun <T> guarded(error: (Throwable) -> Throwable, run: () -> T): T = try {
        run()
    } catch (thrown: RuntimeException) {
        throw error(thrown)
    } catch (thrown: LinkageError) {
        throw error(thrown)
    } catch (thrown: OutOfMemoryError) {
        throw error(thrown)
    }

    private companion object {
        const val METHOD = "forward"
    }
}
