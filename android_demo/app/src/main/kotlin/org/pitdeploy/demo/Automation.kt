package org.pitdeploy.demo

import java.io.File
import java.io.IOException
import java.nio.file.Files
import java.nio.file.StandardCopyOption
import org.pitdeploy.core.Bundle
import org.pitdeploy.core.BundleError
import org.pitdeploy.core.json.toJson

/** What a script asked for by the extras of the start intent: `bundle`, and `bench` or `parity`. */
class Task(val bundle: String, val bench: Boolean, val parity: Boolean)

object Automation {
    const val BENCH_FILE = "benchmark_results.json"
    const val PARITY_FILE = "parity_results.json"
    const val ERROR_FILE = "error.json"

    fun taskOf(bundle: String?, bench: Boolean, parity: Boolean): Task? =
        if (bundle.isNullOrBlank()) null else Task(bundle, bench, parity)

    /**
     * The bundle that a task names: an absolute folder, or the name of one that was imported or pushed to
     * `bundles/` in the app's external files folder. Everything is checked, hashes too: it came over a cable.
     */
    fun find(name: String, imported: File, external: File): Bundle {
        val places = if (File(name).isAbsolute) listOf(File(name)) else listOf(File(imported, name), File(external, "bundles/$name"))
        val folder = places.firstOrNull { it.isDirectory }
            ?: throw BundleError("not_a_bundle", "There is no bundle at ${places.joinToString(" or ")}; push it there with adb push.")
        return Bundle.open(folder.toPath(), checkHashes = true)
    }

    /** Writes JSON beside its name and renames, so that a script that waits for the file reads a whole one. */
    @Throws(IOException::class)
    fun write(folder: File, name: String, value: Map<String, Any?>) {
        val partial = File(folder, "$name.partial").toPath()
        Files.write(partial, (toJson(value, 1) + "\n").toByteArray())
        Files.move(partial, File(folder, name).toPath(), StandardCopyOption.ATOMIC_MOVE)
    }

    /** Results of before, which a script would take for those of this run. */
    fun clear(folder: File) = listOf(BENCH_FILE, PARITY_FILE, ERROR_FILE).forEach { File(folder, it).delete() }
}
