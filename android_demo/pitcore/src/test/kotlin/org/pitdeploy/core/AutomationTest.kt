package org.pitdeploy.core

import java.nio.file.Files
import java.nio.file.Path
import org.junit.Assert.assertEquals
import org.junit.Assert.assertNotNull
import org.junit.Assert.assertNull
import org.junit.Assert.assertTrue
import org.junit.Rule
import org.junit.Test
import org.junit.rules.TemporaryFolder
import org.pitdeploy.core.json.Json

class AutomationTest {
    @get:Rule
    val temporary = TemporaryFolder()

    private fun write(bundle: Path) {
        val case = fields(Json.parse(Vectors.bytes("manifests/index.json"))).cases("cases").first { it["name"] == "good_onnx" }
        Files.createDirectories(bundle)
        Files.write(bundle.resolve("manifest.json"), Vectors.bytes("manifests/good_onnx.json"))
        for (file in case.cases("files")) Files.write(bundle.resolve(file.text("path")), file.text("text").toByteArray())
    }

    private fun names(folder: Path): List<String> = Files.list(folder).use { p -> p.map { it.fileName.toString() }.sorted().toArray() }.map { it as String }

    @Test
    fun `extras without a bundle are a person`() {
        assertNull(Task.of(null, bench = true, parity = false))
        assertNull(Task.of(" ", bench = false, parity = false))
        assertNotNull(Task.of("b", bench = false, parity = true))
    }

    @Test
    fun `a bundle is found by name or place, and hashed`() {
        val imported = temporary.newFolder().toPath()
        val external = temporary.newFolder().toPath()
        val automation = Automation(imported, external)
        write(imported.resolve("mine"))
        write(external.resolve("bundles/pushed"))
        assertEquals(imported.resolve("mine"), automation.find("mine").path)
        assertEquals(external.resolve("bundles/pushed"), automation.find("pushed").path)
        assertEquals(imported.resolve("mine"), automation.find(imported.resolve("mine").toString()).path)
        for (name in listOf("gone", "../${imported.fileName}/mine", "a//b")) {
            assertEquals("not_a_bundle", assertFails<BundleError>(name) { automation.find(name) }.kind)
        }
        val weights = external.resolve("bundles/pushed/model.onnx_data")
        Files.write(weights, Files.readAllBytes(weights).also { it[0]++ })
        assertEquals("wrong_hash", assertFails<BundleError>("damaged on the way") { automation.find("pushed") }.kind)
    }

    @Test
    fun `results appear whole, and those of before are gone`() {
        val external = temporary.newFolder().toPath().resolve("files")
        val automation = Automation(temporary.newFolder().toPath(), external)
        val task = Task.of("b", bench = true, parity = true)!!
        automation.clear()
        automation.writeBench(mapOf("format" to "pit-deploy bench"))
        automation.writeBench(mapOf("format" to "again"))
        automation.writeError(task, "Something went wrong.")
        assertEquals(listOf("benchmark_results.json", "error.json"), names(external))
        assertEquals(mapOf("format" to "again"), Json.parse(Files.readAllBytes(external.resolve("benchmark_results.json"))))
        assertEquals(mapOf("bundle" to "b", "error" to "Something went wrong."), Json.parse(Files.readAllBytes(external.resolve("error.json"))))
        automation.clear()
        assertTrue(names(external).isEmpty())
    }
}
