package org.pitdeploy.core

import java.io.ByteArrayInputStream
import java.io.IOException
import java.io.InputStream
import java.nio.file.Files
import java.nio.file.Path
import java.nio.file.Paths
import org.junit.Assert.assertEquals
import org.junit.Assert.assertFalse
import org.junit.Assert.assertNull
import org.junit.Assert.assertTrue
import org.junit.Rule
import org.junit.Test
import org.junit.rules.TemporaryFolder
import org.pitdeploy.core.json.Json
import org.pitdeploy.core.json.JsonError
import org.pitdeploy.core.json.JsonSchema

class BundleTest {
    @get:Rule
    val temporary = TemporaryFolder()

    private val cases = fields(Json.parse(Vectors.bytes("manifests/index.json"))).cases("cases")

    private fun build(case: Fields): Path {
        val bundle = temporary.newFolder().toPath().resolve("bundle")
        Files.createDirectories(bundle)
        Files.write(bundle.resolve("manifest.json"), Vectors.bytes("manifests/${case.text("manifest")}"))
        for (file in case.cases("files")) {
            val path = bundle.resolve(file.text("path"))
            Files.createDirectories(path.parent)
            if ("link" in file) Files.createSymbolicLink(path, Paths.get(file.text("link")))
            else Files.write(path, file.text("text").toByteArray())
        }
        return bundle
    }

    @Test
    fun `bundles, good and bad, end as the vectors say`() {
        assertTrue(cases.size >= 40)
        for (case in cases) {
            val name = case.text("name")
            val bundle = build(case)
            val hashes = case["check_hashes"] as Boolean
            if (case["expect"] == "ok") {
                assertTrue(name, Files.exists(Bundle.open(bundle, hashes).modelPath))
                continue
            }
            val error = assertFails<BundleError>(name) { Bundle.open(bundle, hashes) }
            assertEquals("$name: ${error.message}", case["expect"], error.kind)
            assertTrue(name, bundle.toString() in error.message!!)
        }
    }

    @Test
    fun `the schema alone accepts what it accepts in Python`() {
        val schema = JsonSchema(fields(Json.parse(javaClass.getResourceAsStream("/manifest.schema.json")!!.readBytes())))
        for (case in cases) {
            val accepted = try {
                schema.firstProblem(Json.parse(Vectors.bytes("manifests/${case.text("manifest")}"))) == null
            } catch (_: JsonError) {
                false
            }
            assertEquals(case.text("name"), case["schema_accepts"], accepted)
        }
    }

    @Test
    fun `a newer version is refused with both numbers`() {
        val case = cases.first { it["name"] == "bad_newer_version" }
        val error = assertFails<BundleError>("newer") { Bundle.open(build(case)) }
        assertTrue(error.message!!, "format version 2" in error.message!! && "reads version 1" in error.message!! && "update the app" in error.message!!)
    }

    @Test
    fun `JSON is read strictly`() {
        val wrong = listOf("", "{", "[1,]", "{\"a\":1,\"a\":2}", "NaN", "[1e999]", "\"\\ud800\"", "01", "'a'", "{\"a\" 1}", "tru", "1 2", "\"\u0001\"", "\"\\x\"", "[".repeat(2000))
        for (text in wrong) {
            try {
                Json.parse(text)
                throw AssertionError("$text was read")
            } catch (_: JsonError) {
                continue
            }
        }
        assertEquals(listOf(1L, 1.0, -0.5e3, "a\u00e9\uD83D\uDE00\n", true, null), Json.parse("[1, 1.0, -0.5e3, \"a\\u00e9\\ud83d\\ude00\\n\", true, null]"))
        assertEquals("it is not UTF-8 at byte 1", runCatching { Json.parse(byteArrayOf(0x22, 0xC3.toByte(), 0x28)) }.exceptionOrNull()?.message)
    }

    /** A source that gives the files of a vector, and can break in the middle. */
    private class Source(private val files: Map<String, ByteArray>, private val breakAt: String? = null) : BundleSource {
        override val name = "picked"
        val opened = ArrayList<String>()

        override fun open(path: String): InputStream? {
            opened.add(path)
            if (path == breakAt) {
                return object : InputStream() {
                    override fun read(): Int = throw IOException("the card was taken out")
                }
            }
            return files[path]?.let { ByteArrayInputStream(it) }
        }
    }

    private fun files(case: Fields): Map<String, ByteArray> {
        val files = case.cases("files").filter { "text" in it }.associate { it.text("path") to it.text("text").toByteArray() }
        return files + ("manifest.json" to Vectors.bytes("manifests/${case.text("manifest")}"))
    }

    private val good get() = files(cases.first { it["name"] == "good_onnx" })

    private fun contents(root: Path): List<String> =
        if (!Files.exists(root)) emptyList() else Files.walk(root).use { p -> p.filter { Files.isRegularFile(it) }.map { root.relativize(it).toString() }.sorted().toArray() }.map { it as String }

    @Test
    fun `an import is whole`() {
        val root = temporary.newFolder().toPath()
        val source = Source(good + ("notes.txt" to ByteArray(9)))
        var last = 0L to 0L
        val bundle = BundleImport(root).run(source, Long.MAX_VALUE) { done, total -> last = done to total }
        assertEquals(root, bundle.path.parent)
        assertEquals(last.second, last.first)
        assertEquals(good.keys.sorted(), contents(bundle.path))
        assertFalse("notes.txt is not listed", "notes.txt" in source.opened)
        bundle.checkHashes()
        assertEquals(listOf(bundle.path), BundleImport(root).list().map { it.path })

        val again = Source(good)
        assertEquals(bundle.path, BundleImport(root).run(again, Long.MAX_VALUE).path)
        assertEquals("what is there is not copied again", listOf("manifest.json"), again.opened)

        Files.write(bundle.path.resolve("model.onnx"), ByteArray(0))
        assertEquals(emptyList<Bundle>(), BundleImport(root).list())
        val before = contents(root)
        assertFails<InputError>("cut off") { BundleImport(root).run(Source(good, breakAt = "tokenizer.json"), Long.MAX_VALUE) }
        assertEquals("what is there stays until the new copy is whole", before, contents(root))
        BundleImport(root).run(Source(good), Long.MAX_VALUE).checkHashes()
        BundleImport(root).remove(BundleImport(root).list().single())
        assertEquals(emptyList<String>(), contents(root))
    }

    @Test
    fun `a damaged import leaves nothing and loses nothing`() {
        val root = temporary.newFolder().toPath()
        val other = temporary.newFolder().toPath()
        Files.write(other.resolve("chat.txt"), byteArrayOf(1))
        val weights = good.getValue("model.onnx_data")
        val wrong = mapOf(
            "wrong_size" to good + ("model.onnx_data" to weights.copyOf(weights.size - 1)),
            "wrong_size " to good + ("model.onnx_data" to weights + 0),
            "wrong_hash" to good + ("model.onnx_data" to weights.copyOf().also { it[2] = 0 }),
            "missing_file" to good - "tokenizer.json",
            "not_a_bundle" to good - "manifest.json",
            "newer_version" to good + ("manifest.json" to Vectors.bytes("manifests/bad_newer_version.json")),
            "path_escape" to good + ("manifest.json" to Vectors.bytes("manifests/path_escape_parent.json")),
        )
        for ((kind, files) in wrong) {
            val error = assertFails<BundleError>(kind) { BundleImport(root).run(Source(files), Long.MAX_VALUE) }
            assertEquals(kind.trim(), error.kind)
            assertEquals(kind, emptyList<String>(), contents(root))
        }
        val huge = assertFails<BundleError>("huge") { BundleImport(root).run(Source(mapOf("manifest.json" to ByteArray((16 shl 20) + 1))), Long.MAX_VALUE) }
        assertEquals("wrong_size", huge.kind)
        assertFails<InputError>("cut off") { BundleImport(root).run(Source(good, breakAt = "model.onnx_data"), Long.MAX_VALUE) }
        assertTrue("MB" in assertFails<InputError>("no room") { BundleImport(root).run(Source(good), 10) }.message!!)
        assertEquals(emptyList<String>(), contents(root))
        assertEquals(listOf("chat.txt"), contents(other))
    }

    @Test
    fun `the tokenizer is checked on the manifest's texts`() {
        val bundle = Bundle.open(build(cases.first { it["name"] == "good_onnx" }))
        bundle.checkTokenizer { text -> bundle.manifest.tokenizerChecks.first { it.text == text }.ids }
        val error = assertFails<BundleError>("other ids") { bundle.checkTokenizer { intArrayOf(1, 2, 3) } }
        assertEquals("tokenizer_mismatch", error.kind)
        assertNull(bundle.json("no.json")["a"])
        assertEquals("missing_file", assertFails<BundleError>("unlisted") { bundle.read("no.json") }.kind)
    }
}
