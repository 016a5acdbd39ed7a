package org.pitdeploy.core

import java.io.IOException
import java.nio.file.Files
import java.nio.file.Path
import java.nio.file.Paths
import java.nio.file.StandardCopyOption
import org.pitdeploy.core.json.toJson

/** What a script asked for by the extras of the start intent: `bundle`, `bench` and `parity`. */
class Task private constructor(val bundle: String, val bench: Boolean, val parity: Boolean) {
    companion object {
        /** Null where the extras name no bundle: then a person started the app. */
        fun of(bundle: String?, bench: Boolean, parity: Boolean): Task? =
            if (bundle.isNullOrBlank()) null else Task(bundle, bench, parity)
    }
}

/** The files through which a script and the app speak; they lie in the app's external folder. */
class Automation(private val imported: Path, private val external: Path) {
    /**
     * The bundle of a task: an absolute folder, or the name of one that was imported or pushed to `bundles/` of the external
     * folder. Everything is checked, hashes too: it came over a cable.
     */
    fun find(name: String): Bundle {
        val relative = name.split("/").none { it == ".." || it.isEmpty() }
        val places = if (relative) listOf(imported.resolve(name), external.resolve("bundles/$name")) else listOf(Paths.get(name))
        val folder = places.firstOrNull { it.isAbsolute && Files.isDirectory(it) }
            ?: throw BundleError("not_a_bundle", "There is no bundle at ${places.joinToString(" or ")}; bring it there with adb push.")
        return Bundle.open(folder, checkHashes = true)
    }

    /** Removes results of before, which a script would take for those of this run. */
    fun clear() = NAMES.forEach { Files.deleteIfExists(external.resolve(it)) }

    fun writeBench(report: Map<String, Any?>) = write(BENCH, report)

    fun writeParity(bundle: Bundle, report: ParityReport) = write(PARITY, mapOf("bundle" to bundle.path.toString()) + report.toJson())

    fun writeError(task: Task, sentence: String) = write(ERROR, mapOf("bundle" to task.bundle, "error" to sentence))

    /** Written beside its name and renamed: a script that waits for the file reads a whole one. Throws [IOException]. */
    private fun write(name: String, value: Map<String, Any?>) {
        Files.createDirectories(external)
        val partial = external.resolve("$name.partial")
        Files.write(partial, (toJson(value, 1) + "\n").toByteArray())
        Files.move(partial, external.resolve(name), StandardCopyOption.ATOMIC_MOVE, StandardCopyOption.REPLACE_EXISTING)
    }

    companion object {
        const val BENCH = "benchmark_results.json"
        const val PARITY = "parity_results.json"
        const val ERROR = "error.json"
        private val NAMES = listOf(BENCH, PARITY, ERROR)
    }
}
