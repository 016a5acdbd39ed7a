package org.pitdeploy.core

import org.junit.Assert.assertArrayEquals
import org.junit.Assert.assertEquals
import org.junit.Assert.assertTrue
import org.junit.Test

class SamplerTest {
    @Test
    fun `philox words and uniform numbers`() {
        val document = Vectors.load("philox.json")
        for (case in document.cases("philox")) {
            fun words(name: String) = case.list(name).map { it as Long }.toLongArray()
            assertArrayEquals(words("expected"), Philox.words(words("counter"), words("key")))
        }
        for (case in document.cases("uniform")) {
            val found = Philox.uniform(case.text("seed").toULong(), case.text("step").toULong())
            assertEquals(case.number("expected"), found, 0.0)
        }
    }

    @Test
    fun `candidates, probabilities and draws`() {
        val document = Vectors.load("sampling.json")
        assertTrue(document.cases("cases").size >= 60)
        for (case in document.cases("cases")) {
            val name = case.text("name")
            val logits = logits(case)
            val options = case.part("options").samplingOptions()
            val previous = case.ints("previous_ids")
            val expected = case.part("expected")
            val found = Sampler.candidates(logits, options, previous)
            assertEquals(name, expected.ints("ids"), found.ids.toList())
            val probabilities = expected.list("probabilities").map { number(it) }.toDoubleArray()
            assertArrayEquals(name, probabilities, found.probabilities, 1e-9)
            assertEquals(name, expected.int("drawn"), Sampler.sample(logits, options, case.text("step").toULong(), previous))
        }
    }

    @Test
    fun `logits that are not finite are refused`() {
        for (case in Vectors.load("sampling.json").cases("errors")) {
            for (temperature in listOf(0.0, 1.0)) {
                assertFails<InputError>(case.text("name")) { Sampler.sample(logits(case), SamplingOptions(temperature), 0u) }
            }
        }
    }

    @Test
    fun `options outside their range name themselves`() {
        val wrong = mapOf<String, () -> SamplingOptions>(
            "temperature" to { SamplingOptions(temperature = -1.0) },
            "top_k" to { SamplingOptions(topK = -1) },
            "top_p" to { SamplingOptions(topP = 1.5) },
            "min_p" to { SamplingOptions(minP = Double.NaN) },
            "repetition_penalty" to { SamplingOptions(repetitionPenalty = 0.0) },
        )
        for ((name, make) in wrong) assertTrue(name in assertFails<InputError>(name) { make() }.message!!)
    }

    @Test
    fun `a generation config is taken as Python takes it`() {
        assertEquals(SamplingOptions(), SamplingOptions.ofGenerationConfig(mapOf("temperature" to 0.6, "do_sample" to false)))
        val given = mapOf("do_sample" to true, "temperature" to 0.6, "top_k" to 50L, "top_p" to 0.9, "min_p" to null, "repetition_penalty" to 1.1)
        assertEquals(SamplingOptions(0.6, 50, 0.9, 0.0, 1.1, 4u), SamplingOptions.ofGenerationConfig(given, 4u))
        assertEquals(1.0, SamplingOptions.ofGenerationConfig(mapOf("do_sample" to true)).temperature, 0.0)
        assertFails<InputError>("text") { SamplingOptions.ofGenerationConfig(mapOf("top_p" to "0.9")) }
    }

    @Test
    fun `a large vocabulary draws what a plain sort draws`() {
        val random = java.util.Random(4)
        val logits = FloatArray(50_000) { (random.nextGaussian() * 3).toFloat() }
        val order = logits.indices.sortedWith(compareBy({ -logits[it] }, { it }))
        val options = SamplingOptions(temperature = 0.8, topP = 0.95, seed = 9u)
        val found = Sampler.candidates(logits, options)
        assertEquals(order.take(found.ids.size), found.ids.toList())
        assertEquals(1.0, found.probabilities.sum(), 1e-9)
        assertTrue(found.ids.size in 100..20_000)
        assertTrue(Sampler.sample(logits, options, 7u) in found.ids)
    }

    private fun logits(case: Fields) = case.list("logits").map { number(it).toFloat() }.toFloatArray()
}
