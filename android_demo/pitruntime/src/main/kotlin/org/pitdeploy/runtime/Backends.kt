package org.pitdeploy.runtime

import org.pitdeploy.core.BackendOpener
import org.pitdeploy.core.Bundle
import org.pitdeploy.core.DecoderBackend
import org.pitdeploy.core.InputError

/** Opens bundles in the runtime that their manifest names; [threads] 0 leaves their number to the runtime. */
class Backends(private val threads: Int = 0) : BackendOpener {
    override fun open(bundle: Bundle): DecoderBackend = when (bundle.manifest.runtime) {
        "onnx" -> OnnxBackend(bundle, threads)
        "executorch" -> ExecutorchBackend(bundle, threads)
        else -> throw InputError(
            "This bundle is for ${bundle.manifest.runtime}, which Android does not have; export it with --to onnx or --to executorch.",
        )
    }
}
