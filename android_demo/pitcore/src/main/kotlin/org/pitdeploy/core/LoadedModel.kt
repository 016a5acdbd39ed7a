package org.pitdeploy.core

import org.pitdeploy.core.tokenizer.Tokenizer

/** Opens the backend of a checked bundle. */
fun interface BackendOpener {
    fun open(bundle: Bundle): DecoderBackend
}

/** A bundle with its tokenizer, its chat template (null where it has none) and its running model. */
class LoadedModel(val bundle: Bundle, val tokenizer: Tokenizer, val template: ChatTemplate?, val backend: DecoderBackend) :
    AutoCloseable by backend {
    val options: SamplingOptions = SamplingOptions.ofGenerationConfig(bundle.json("generation_config.json"))

    companion object {
        /**
         * Checks the bundle, its tokenizer on the manifest's texts and the memory, then opens the model.
         *
         * [availableBytes] null means that it is not known. Throws [BundleError], [InputError] or [ModelError], each with one
         * sentence; nothing stays open then.
         */
        fun open(prepared: Prepared, opener: BackendOpener, availableBytes: Long?): LoadedModel {
            val manifest = prepared.bundle.manifest
            val needed = neededBytes(prepared.bundle)
            if (availableBytes != null && needed > availableBytes) {
                throw ModelErrors.outOfMemory(manifest.sourceName, needed, availableBytes)
            }
            val backend = try {
                opener.open(prepared.bundle)
            } catch (error: OutOfMemoryError) {
                throw ModelErrors.atLoad(manifest.sourceName, manifest.runtime, error)
            }
            if (backend.vocabSize != manifest.vocabSize || backend.contextLength != manifest.contextLength) {
                backend.close()
                throw BundleError(
                    "bad_value",
                    "The model of ${prepared.bundle.path} has ${backend.vocabSize} rows and a context of " +
                        "${backend.contextLength}, and its manifest says ${manifest.vocabSize} and ${manifest.contextLength}; export the bundle again.",
                )
            }
            return LoadedModel(prepared.bundle, prepared.tokenizer, prepared.template, backend)
        }

        /** Everything that can be checked before the model is opened. */
        fun prepare(bundle: Bundle): Prepared {
            val tokenizer = Tokenizer.parse(bundle.read("tokenizer.json"))
            bundle.checkTokenizer { tokenizer.encode(it) }
            SamplingOptions.ofGenerationConfig(bundle.json("generation_config.json"))
            return Prepared(bundle, tokenizer, ChatTemplate.of(bundle))
        }

        /** Weights (mapped or copied by the runtime) and the cache of keys and values. */
        fun neededBytes(bundle: Bundle): Long {
            val manifest = bundle.manifest
            val row = 2L * manifest.layers * manifest.keyValueHeads * manifest.headDim * Float.SIZE_BYTES
            return bundle.modelBytes + row * manifest.contextLength
        }
    }

    /** A bundle that may be opened. */
    class Prepared(val bundle: Bundle, val tokenizer: Tokenizer, val template: ChatTemplate?)
}

/**
 * The one model that is in memory. A phone holds no two, so the old one is closed before another is opened; where that
 * fails the old one is opened again, and the error says why.
 */
class ModelHolder(private val opener: BackendOpener, private val availableBytes: () -> Long?) : AutoCloseable {
    var current: LoadedModel? = null
        private set

    /** Throws what [LoadedModel.open] throws; [current] is then the model of before, where it can be had again. */
    fun switchTo(bundle: Bundle): LoadedModel {
        val prepared = LoadedModel.prepare(bundle)
        val before = current
        close()
        try {
            return LoadedModel.open(prepared, opener, availableBytes()).also { current = it }
        } catch (error: PitError) {
            if (before != null) {
                val old = LoadedModel.Prepared(before.bundle, before.tokenizer, before.template)
                current = try {
                    LoadedModel.open(old, opener, availableBytes())
                } catch (_: PitError) {
                    null
                }
            }
            throw error
        }
    }

    override fun close() {
        current?.close()
        current = null
    }
}
