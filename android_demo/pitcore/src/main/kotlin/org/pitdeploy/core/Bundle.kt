package org.pitdeploy.core

import java.io.IOException
import java.nio.file.Files
import java.nio.file.NoSuchFileException
import java.nio.file.NotDirectoryException
import java.nio.file.Path
import java.security.MessageDigest
import org.pitdeploy.core.Manifest.Companion.AGAIN
import org.pitdeploy.core.json.Json
import org.pitdeploy.core.json.JsonError

/** A bundle that was checked when it was opened; the folder is only read. */
class Bundle private constructor(val path: Path, val manifest: Manifest) {
    /** What the runtime opens. */
    val modelPath: Path get() = path.resolve(manifest.modelFile)

    /** Bytes of the listed files and of the manifest. */
    val totalBytes: Long get() = manifest.files.sumOf { it.size } + Files.size(path.resolve(MANIFEST))

    /** Bytes of the graph and its weights: of [Manifest.modelFile] and what lies beside it under its name. */
    val modelBytes: Long
        get() = manifest.files.filter { it.path.startsWith(manifest.modelFile) }.sumOf { it.size }

    fun has(relative: String): Boolean = manifest.files.any { it.path == relative }

    /** Bytes of a listed file. Throws [BundleError] where the manifest has none of that name. */
    fun read(relative: String): ByteArray {
        if (!has(relative)) throw BundleError("missing_file", "The bundle $path has no file '$relative'; $AGAIN")
        return try {
            Files.readAllBytes(path.resolve(relative))
        } catch (error: IOException) {
            throw unreadable(path.resolve(relative), error)
        }
    }

    /** A listed JSON object; empty where the bundle has none of that name. */
    fun json(relative: String): Map<String, Any?> {
        if (!has(relative)) return emptyMap()
        val data = try {
            Json.parse(read(relative))
        } catch (error: JsonError) {
            throw BundleError("bad_json", "${path.resolve(relative)} is not valid JSON (${error.message}); $AGAIN")
        }
        @Suppress("UNCHECKED_CAST")
        return data as? Map<String, Any?>
            ?: throw BundleError("bad_json", "${path.resolve(relative)} is not a JSON object; $AGAIN")
    }

    /** Reads every listed file and throws [BundleError] at the first whose SHA-256 is another. */
    fun checkHashes(progress: (done: Long, total: Long) -> Unit = { _, _ -> }) {
        val total = manifest.files.sumOf { it.size }
        var before = 0L
        for (entry in manifest.files) {
            val file = path.resolve(entry.path)
            val found = try {
                sha256(file) { progress(before + it, total) }
            } catch (error: IOException) {
                throw unreadable(file, error)
            }
            if (found != entry.sha256) {
                throw BundleError(
                    "wrong_hash",
                    "$file has changed: its SHA-256 starts with ${found.take(12)} and the manifest says " +
                        "${entry.sha256.take(12)}; $AGAIN",
                )
            }
            before += entry.size
        }
    }

    /** Encodes the manifest's check texts and throws [BundleError] at the first whose ids are others. */
    fun checkTokenizer(encode: (String) -> IntArray) {
        for (check in manifest.tokenizerChecks) {
            val ids = encode(check.text)
            if (!ids.contentEquals(check.ids)) {
                throw BundleError(
                    "tokenizer_mismatch",
                    "The tokenizer of $path encodes ${Manifest.show(check.text)} as ${Manifest.show(ids.toList())}, and the " +
                        "manifest says ${Manifest.show(check.ids.toList())}; the app cannot use this bundle until it is updated.",
                )
            }
        }
    }

    companion object {
        const val MANIFEST = "manifest.json"
        internal const val BIGGEST_MANIFEST = 16 shl 20

        /**
         * Reads the manifest and checks that every file is there, inside the folder and of the declared size; with
         * [checkHashes] all bytes too. Throws [BundleError]; no runtime has seen a byte by then.
         */
        fun open(path: Path, checkHashes: Boolean = false): Bundle {
            val bundle = Bundle(path, Manifest.parse(readManifest(path), "$path/$MANIFEST"))
            bundle.manifest.files.forEach { checkFile(path, it) }
            checkLinks(path)
            if (checkHashes) bundle.checkHashes()
            return bundle
        }

        /** SHA-256 of a file in hexadecimal, read in pieces. */
        fun sha256(file: Path, progress: (bytes: Long) -> Unit = {}): String {
            val digest = MessageDigest.getInstance("SHA-256")
            val buffer = ByteArray(1 shl 20)
            var done = 0L
            Files.newInputStream(file).use { stream ->
                while (true) {
                    val count = stream.read(buffer)
                    if (count < 0) break
                    digest.update(buffer, 0, count)
                    done += count
                    progress(done)
                }
            }
            return digest.digest().joinToString("") { "%02x".format(it) }
        }

        private fun readManifest(path: Path): ByteArray {
            val file = path.resolve(MANIFEST)
            if (!Files.isDirectory(path) || !(Files.exists(file) || Files.isSymbolicLink(file))) {
                throw BundleError("not_a_bundle", "$path has no $MANIFEST; choose the folder that pit-deploy export wrote.")
            }
            checkInside(path, MANIFEST)
            try {
                val size = Files.size(file)
                if (size > BIGGEST_MANIFEST) {
                    throw BundleError("wrong_size", "$file has $size bytes, and a manifest has $BIGGEST_MANIFEST at most; $AGAIN")
                }
                return Files.readAllBytes(file)
            } catch (error: IOException) {
                throw unreadable(file, error)
            }
        }

        private fun checkFile(root: Path, entry: FileEntry) {
            val real = checkInside(root, entry.path)
            val file = root.resolve(entry.path)
            if (!Files.isRegularFile(real)) {
                val found = if (Files.isDirectory(real)) "is a folder" else "is not a plain file"
                throw BundleError("missing_file", "$file $found, and the manifest lists a file; $AGAIN")
            }
            val size = Files.size(real)
            if (size != entry.size) {
                throw BundleError("wrong_size", "$file has $size bytes, and the manifest says ${entry.size}; $AGAIN")
            }
        }

        /** The real path of a file of the bundle; [BundleError] where it is not there or a link leads outside. */
        private fun checkInside(root: Path, relative: String): Path {
            val file = root.resolve(relative)
            val real = try {
                file.toRealPath()
            } catch (_: NoSuchFileException) {
                if (leadsOut(root, file)) throw escape(root, relative)
                throw BundleError("missing_file", "$file is missing, and the manifest of $root lists it; $AGAIN")
            } catch (_: NotDirectoryException) {
                throw BundleError("missing_file", "$file is missing, and the manifest of $root lists it; $AGAIN")
            } catch (error: IOException) {
                throw unreadable(file, error)
            }
            if (!real.startsWith(root.toRealPath())) throw escape(root, relative)
            return real
        }

        /** Whether a link leaves the bundle, or its target cannot be told. */
        private fun leadsOut(root: Path, file: Path): Boolean {
            if (!Files.isSymbolicLink(file)) return false
            val target = file.parent.resolve(Files.readSymbolicLink(file)).toAbsolutePath().normalize()
            return !target.startsWith(root.toAbsolutePath().normalize())
        }

        /** Links out of the folder are refused, listed or not: a model may name any file beside it. */
        private fun checkLinks(root: Path) {
            val real = root.toRealPath()
            Files.walk(root).use { paths ->
                for (file in paths) {
                    if (!Files.isSymbolicLink(file)) continue
                    val inside = try {
                        file.toRealPath().startsWith(real)
                    } catch (_: IOException) {
                        !leadsOut(root, file)
                    }
                    if (!inside) throw escape(root, root.relativize(file).toString())
                }
            }
        }

        private fun escape(root: Path, relative: String) = BundleError(
            "path_escape",
            "$root/$relative leads outside the bundle by a link, which is not followed; copy the bundle with the files " +
                "in place of links, for example with cp -rL.",
        )

        private fun unreadable(file: Path, error: IOException) =
            BundleError("unreadable_file", "$file cannot be read (${error.message}); check that it is a file that the app may read.")
    }
}
