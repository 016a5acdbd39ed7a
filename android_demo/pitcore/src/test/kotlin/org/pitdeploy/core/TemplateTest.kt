package org.pitdeploy.core

import java.util.Date
import org.junit.Assert.assertEquals
import org.junit.Assert.assertTrue
import org.junit.Test
import org.pitdeploy.core.json.toJson
import org.pitdeploy.core.template.Template

class TemplateTest {
    @Test
    fun `templates give transformers' text`() {
        val document = Vectors.load("templates.json")
        assertTrue(document.cases("cases").size >= 100)
        for (case in document.cases("cases")) {
            val name = case.text("name")
            val expected = case.part("expected")
            val template = document.part("templates").text(case.text("template"))
            val variables = case.part("variables") + mapOf(
                "messages" to case.list("messages"),
                "add_generation_prompt" to case["add_generation_prompt"],
            )
            if ("error" in expected) assertFails<InputError>(name) { Template(template).render(variables) }
            else assertEquals(name, expected.text("text"), Template(template).render(variables))
        }
    }

    @Test
    fun `what is not known is refused and never guessed`() {
        for (case in Vectors.load("templates.json").cases("refused")) {
            val variables = mapOf("messages" to case.list("messages"), "add_generation_prompt" to true)
            assertFails<InputError>(case.text("name")) { Template(case.text("template")).render(variables) }
        }
    }

    private fun render(template: String, vararg values: Pair<String, Any?>) = Template(template).render(mapOf(*values))

    @Test
    fun `scopes are Jinja's`() {
        assertEquals("[][]", render("{% for x in [1,2] %}{% if x==2 %}[{{ y }}]{% endif %}{% set y = x %}{% endfor %}[{{y}}]"))
        assertEquals("[0][0][0]", render("{% set y=0 %}{% for x in [1,2] %}[{{ y }}]{% set y = x %}{% endfor %}[{{y}}]"))
        assertEquals("2", render("{% set a=1 %}{% macro m() %}{{ a }}{% endmacro %}{% set a=2 %}{{ m() }}"))
        assertEquals("4", render("{% set ns = namespace(a=1) %}{% for x in [1,2] %}{% set ns.a = ns.a + x %}{% endfor %}{{ ns.a }}"))
        assertEquals("13", render("{% for x in [1,2,3] %}{% if x==2 %}{% continue %}{% endif %}{{x}}{% if x==3 %}{% break %}{% endif %}{% endfor %}"))
        assertEquals("none", render("{% for x in [] %}a{% else %}none{% endfor %}"))
        assertEquals("hello 1", render("{% set x %}hello {{ 1 }}{% endset %}{{ x }}"))
    }

    @Test
    fun `values are Python's`() {
        assertEquals("TrueNoneTrue1.03.5|a", render("{{ true }}{{ none }}{{ 1 == true }}{{ 1.0 }}{{ 7/2 }}{{ nothing }}|{{ nothing ~ 'a' }}"))
        assertEquals("b|False", render("{{ 'abc'[1] }}{{ 'abc'[9] }}{{ messages[5] }}|{{ 'a' in nothing }}", "messages" to listOf<Any>()))
        assertEquals("True-21", render("{{ 'a' < 'b' }}{{ -3 // 2 }}{{ -3 % 2 }}"))
        assertEquals("4a-bb-c", render("{{ 'a,b,,c'.split(',') | length }}{{ ' a  b '.split() | join('-') }}{{ 'a-b-c'.split('-', 1)|last }}"))
        assertEquals("\uD83D\uDE00c", render("{{ 'a\uD83D\uDE00bc'[1] }}{{ 'a\uD83D\uDE00bc'[-1:] }}"))
        assertEquals("a1b2", render("{% for k, v in {'a':1,'b':2}.items() %}{{k}}{{v}}{% endfor %}"))
        assertEquals("{\"a\": [1, {\"b\": null}], \"c\": \"\u00e9\\\"\"}", render("{{ {'a':[1,{'b':none}],'c':'\u00e9\"'}|tojson }}"))
        assertEquals("{\n  \"a\": 1\n}", render("{{ {'a':1}|tojson(indent=2) }}"))
        assertEquals("a\nb\n", render("a\r\n  {% if true %}\r\nb\r\n  {% endif %}\r\n"))
        assertEquals("2dfltNone", render("{{ m.items() | list | length }}{{ m.get('zz', 'dflt') }}{{ m.get('zz') }}", "m" to mapOf("a" to 1L, "b" to 2L)))
    }

    @Test
    fun `the date is the clock's`() {
        val clock = { Date(1_785_000_000_000) }
        assertEquals("25 Jul 2026", Template("{{ strftime_now('%d %b %Y') }}", clock).render(emptyMap()))
        assertFails<InputError>("date") { Template("{{ strftime_now('%j') }}", clock).render(emptyMap()) }
    }

    @Test
    fun `a template that does not end is stopped`() {
        assertFails<InputError>("loops") { render("{% for a in range(5000) %}{% for b in range(5000) %}{{ a }}{% endfor %}{% endfor %}") }
        assertFails<InputError>("recursion") { render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}") }
        assertFails<InputError>("text") { render("{% set a = 'x' * 9000 %}{% for i in range(900) %}{{ a }}{% endfor %}") }
        assertFails<InputError>("nesting") { render("{{ " + "(".repeat(100_000) + "1" + ")".repeat(100_000) + " }}") }
    }

    @Test
    fun `the special tokens of a tokenizer config`() {
        val config = mapOf("bos_token" to "<s>", "eos_token" to mapOf("content" to "</s>"), "pad_token" to null, "model_max_length" to 5L)
        assertEquals(mapOf("bos_token" to "<s>", "eos_token" to "</s>"), ChatTemplate.specialTokens(config))
        val chat = ChatTemplate("{{ bos_token }}{% if tools %}t{% endif %}{{ messages[0].content }}", ChatTemplate.specialTokens(config))
        assertEquals("<s>hi", chat.render(listOf(Message("user", "hi"))))
        assertFails<InputError>("no message") { chat.render(emptyList()) }
        assertEquals("\"\\u2028\"", toJson("\u2028"))
    }
}
