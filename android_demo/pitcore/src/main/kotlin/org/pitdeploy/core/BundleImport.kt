package org.pitdeploy.core

import java.io.ByteArrayOutputStream
import java.io.IOException
import java.io.InputStream
import java.nio.file.Files
import java.nio.file.Path
import java.nio.file.StandardCopyOption
import java.security.MessageDigest
import java.util.Comparator

/** A folder somewhere else that may be a bundle: a folder that the user picked, or one on a card. */
interface BundleSource {
    val name: String

    /** The file at a path with `/`; null where there is none. */
    fun open(path: String): InputStream?
}

/**
 * Copies a bundle into the app's storage. Every byte is counted and hashed on the way, into a temporary folder that is
 * renamed when all of it was right: a bundle in the app is whole, or it is not there.
 */
class BundleImport(private val root: Path) {
    /**
     * Returns the imported bundle, which may have been there already. Throws [BundleError] for a source that is no bundle,
     * is damaged or of a newer version, and [InputError] where there is no room; nothing is left behind then.
     */
    fun run(source: BundleSource, freeBytes: Long, progress: (done: Long, total: Long) -> Unit = { _, _ -> }): Bundle {
        val text = read(source)
        val manifest = Manifest.parse(text, "${source.name}/${Bundle.MANIFEST}")
        val target = root.resolve(folderName(manifest, text))
        if (Files.isDirectory(target)) {
            try {
                return Bundle.open(target)
            } catch (_: BundleError) {
                // Damaged since: the copy that is made now takes its place.
            }
        }
        val total = manifest.files.sumOf { it.size }
        if (total + text.size > freeBytes) {
            throw InputError(
                "The bundle ${source.name} needs ${total / 1_000_000} MB and ${freeBytes / 1_000_000} MB are free on this device; " +
                    "remove something and import it again.",
            )
        }
        val partial = root.resolve(".${target.fileName}.partial")
        delete(partial)
        try {
            Files.createDirectories(partial)
            var done = 0L
            for (entry in manifest.files) {
                copy(source, entry, partial) { progress(done + it, total) }
                done += entry.size
            }
            Files.write(partial.resolve(Bundle.MANIFEST), text)
            Bundle.open(partial)
            delete(target)
            Files.move(partial, target, StandardCopyOption.ATOMIC_MOVE)
        } catch (error: IOException) {
            throw InputError("The bundle ${source.name} could not be copied (${error.message}); import it again.", error)
        } finally {
            delete(partial)
        }
        return Bundle.open(target)
    }

    /** The bundles that were imported, by name; folders that are damaged are passed over. */
    fun list(): List<Bundle> {
        if (!Files.isDirectory(root)) return emptyList()
        val folders = Files.list(root).use { paths ->
            paths.filter { Files.isDirectory(it) && !it.fileName.toString().startsWith(".") }.sorted().toArray()
        }
        return folders.mapNotNull {
            try {
                Bundle.open(it as Path)
            } catch (_: BundleError) {
                null
            }
        }
    }

    fun remove(bundle: Bundle) {
        require(bundle.path.parent == root) { "${bundle.path} is not an imported bundle" }
        delete(bundle.path)
    }

    private fun read(source: BundleSource): ByteArray {
        try {
            val stream = source.open(Bundle.MANIFEST)
                ?: throw BundleError(
                    "not_a_bundle",
                    "${source.name} has no ${Bundle.MANIFEST}; choose the folder that pit-deploy export wrote.",
                )
            val bytes = stream.use { readAtMost(it, Bundle.BIGGEST_MANIFEST + 1) }
            if (bytes.size > Bundle.BIGGEST_MANIFEST) {
                throw BundleError(
                    "wrong_size",
                    "${source.name}/${Bundle.MANIFEST} is larger than the ${Bundle.BIGGEST_MANIFEST} bytes that a manifest has at " +
                        "most; choose another folder.",
                )
            }
            return bytes
        } catch (error: IOException) {
            throw BundleError(
                "unreadable_file",
                "${source.name}/${Bundle.MANIFEST} cannot be read (${error.message}); choose the folder again.",
            )
        }
    }

    private fun copy(source: BundleSource, entry: FileEntry, into: Path, progress: (Long) -> Unit) {
        val target = into.resolve(entry.path)
        Files.createDirectories(target.parent)
        val where = "${source.name}/${entry.path}"
        val stream = source.open(entry.path)
            ?: throw BundleError("missing_file", "$where is missing, and the manifest lists it; ${Manifest.AGAIN}")
        val digest = MessageDigest.getInstance("SHA-256")
        var size = 0L
        stream.use { input ->
            Files.newOutputStream(target).use { output ->
                val buffer = ByteArray(1 shl 20)
                while (true) {
                    val count = input.read(buffer)
                    if (count < 0) break
                    size += count
                    if (size > entry.size) break
                    digest.update(buffer, 0, count)
                    output.write(buffer, 0, count)
                    progress(size)
                }
            }
        }
        if (size != entry.size) {
            val found = if (size > entry.size) "more than the ${entry.size}" else "$size of the ${entry.size}"
            throw BundleError("wrong_size", "$where has $found bytes that the manifest says; ${Manifest.AGAIN}")
        }
        val hash = digest.digest().joinToString("") { "%02x".format(it) }
        if (hash != entry.sha256) {
            throw BundleError(
                "wrong_hash",
                "$where is damaged: its SHA-256 starts with ${hash.take(12)} and the manifest says ${entry.sha256.take(12)}; " +
                    Manifest.AGAIN,
            )
        }
    }

    private companion object {
        /** Bundles of one name and precision but other content lie beside each other. */
        fun folderName(manifest: Manifest, text: ByteArray): String {
            val hash = MessageDigest.getInstance("SHA-256").digest(text).take(4).joinToString("") { "%02x".format(it) }
            val name = manifest.sourceName.filter { it.isLetterOrDigit() || it in "-_." }.trimStart('.').ifEmpty { "model" }
            return "$name-${manifest.runtime}-${manifest.weights}-$hash"
        }

        fun readAtMost(stream: InputStream, most: Int): ByteArray {
            val found = ByteArrayOutputStream()
            val buffer = ByteArray(1 shl 16)
            while (found.size() < most) {
                val count = stream.read(buffer, 0, minOf(buffer.size, most - found.size()))
                if (count < 0) break
                found.write(buffer, 0, count)
            }
            return found.toByteArray()
        }

        fun delete(folder: Path) {
            if (!Files.exists(folder)) return
            Files.walk(folder).use { paths -> paths.sorted(Comparator.reverseOrder()).forEach { Files.delete(it) } }
        }
    }
}
