package org.pitdeploy.core

/** Limits of one runtime and precision; null where the figure does not decide (pit_deploy/gates.py). */
data class Gate(val maxAbs: Double?, val meanKl: Double, val top1: Double, val greedy: Boolean, val layer: Double) {
    companion object {
        /** Two logits closer than this count as tied. */
        const val TIE = 1e-3

        /** So many times the KL that the manifest states of a nested head comes on top of the limit, at most this. */
        const val NESTED_HEAD_ROOM = 2.0
        const val NESTED_HEAD_MOST = 0.1
        private val ORDER = listOf("fp32", "fp16", "int8", "int4")

        private val ONNX = mapOf(
            "fp32" to Gate(1e-3, 1e-6, 1.0, true, 1e-3),
            "fp16" to Gate(null, 1e-4, 0.995, false, 1e-2),
            "int8" to Gate(null, 5e-3, 0.95, false, 0.15),
            "int4" to Gate(null, 5e-2, 0.90, false, 0.5),
        )
        private val TABLE = mapOf(
            "onnx" to ONNX,
            "executorch" to ONNX + mapOf(
                "int8" to Gate(null, 2.5e-2, 0.92, false, 0.3),
                "int4" to Gate(null, 0.15, 0.75, false, 0.8),
            ),
            "coreml" to ONNX + mapOf(
                "fp16" to Gate(null, 1e-3, 0.99, false, 5e-2),
                "int8" to Gate(null, 7e-3, 0.945, false, 0.15),
            ),
        )

        /** The gate of the coarsest part; [nestedKl] is that of a nested head. */
        fun of(runtime: String, weights: String, tables: String, nestedKl: Double? = null): Gate {
            val gate = TABLE.getValue(runtime).getValue(maxOf(weights, tables, compareBy { ORDER.indexOf(it) }))
            return if (nestedKl == null) gate else gate.copy(meanKl = gate.meanKl + minOf(NESTED_HEAD_ROOM * nestedKl, NESTED_HEAD_MOST))
        }

        /** The gate of a bundle. */
        fun of(manifest: Manifest): Gate = of(manifest.runtime, manifest.weights, manifest.tables, manifest.nestedKl)
    }
}
