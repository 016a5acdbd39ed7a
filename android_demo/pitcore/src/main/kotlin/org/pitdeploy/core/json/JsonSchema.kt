package org.pitdeploy.core.json

import java.math.BigDecimal
import java.math.BigInteger

/** What is wrong: where (`files.0.size`), which rule of the schema, the rule's own value, and what stands there. */
class SchemaProblem(val path: String, val rule: String, val limit: Any?, val value: Any?)

/**
 * The part of JSON Schema (2020-12) that our schemas use. A keyword that is not known is an error when the schema is
 * read, so that no rule is passed over.
 */
class JsonSchema(private val root: Map<String, Any?>) {
    private val patterns = HashMap<String, Regex>()

    init {
        checkKeywords(root)
    }

    /** The first problem in the order of the schema's fields, or null. */
    fun firstProblem(value: Any?): SchemaProblem? = check(root, value, "")

    private fun check(schema: Map<String, Any?>, value: Any?, path: String): SchemaProblem? {
        (schema["\$ref"] as String?)?.let { ref -> check(resolve(ref), value, path)?.let { return it } }
        schema["anyOf"]?.let { branches ->
            val problems = schemas(branches).map { check(it, value, path) ?: return null }
            // A value that should be null or an object: what the object lacks says more than that it is not null.
            return problems.firstOrNull { it.rule != "type" } ?: problems.first()
        }
        fun problem(rule: String, limit: Any? = schema[rule]) = SchemaProblem(path, rule, limit, value)
        schema["type"]?.let { if (!hasType(value, it as String)) return problem("type") }
        if ("const" in schema && schema["const"] != value) return problem("const")
        schema["enum"]?.let { if (value !in it as List<*>) return problem("enum") }
        when (value) {
            is String -> {
                val length = value.codePointCount(0, value.length)
                schema["minLength"]?.let { if (length < it as Long) return problem("minLength") }
                schema["maxLength"]?.let { if (length > it as Long) return problem("maxLength") }
                schema["pattern"]?.let { if (!pattern(it as String).containsMatchIn(value)) return problem("pattern") }
            }
            is Number -> {
                schema["minimum"]?.let { if (decimal(value) < decimal(it as Number)) return problem("minimum") }
                schema["maximum"]?.let { if (decimal(value) > decimal(it as Number)) return problem("maximum") }
            }
            is List<*> -> {
                schema["minItems"]?.let { if (value.size < it as Long) return problem("minItems") }
                schema["items"]?.let { item ->
                    value.forEachIndexed { i, v -> check(schema(item), v, join(path, "$i"))?.let { return it } }
                }
            }
            is Map<*, *> -> return checkObject(schema, value, path)
        }
        return null
    }

    private fun checkObject(schema: Map<String, Any?>, value: Map<*, *>, path: String): SchemaProblem? {
        val properties = schema["properties"]?.let { schema(it) } ?: emptyMap()
        val required = (schema["required"] as List<*>?) ?: emptyList<Any?>()
        for ((name, part) in properties) {
            if (name in value) {
                check(schema(part), value[name], join(path, name))?.let { return it }
            } else if (name in required) {
                return SchemaProblem(join(path, name), "required", null, null)
            }
        }
        val more = schema["additionalProperties"]
        for ((name, item) in value) {
            if (name in properties) continue
            val place = join(path, name as String)
            if (more == false) return SchemaProblem(place, "additionalProperties", null, item)
            schema["propertyNames"]?.let { check(schema(it), name, place)?.let { problem -> return problem } }
            if (more is Map<*, *>) check(schema(more), item, place)?.let { return it }
        }
        return null
    }

    private fun resolve(ref: String): Map<String, Any?> {
        require(ref.startsWith("#/")) { "the schema refers to $ref, which is not inside it" }
        return ref.removePrefix("#/").split("/").fold(root) { part, name -> schema(part[name]) }
    }

    /** ECMA 262's `$` is the end of the text; Java's also stands before a last line break. */
    private fun pattern(text: String) = patterns.getOrPut(text) { Regex(text.replace("$", "\\z"), RegexOption.DOT_MATCHES_ALL) }

    private fun hasType(value: Any?, type: String): Boolean = when (type) {
        "null" -> value == null
        "boolean" -> value is Boolean
        "string" -> value is String
        "integer" -> value is Long || value is BigInteger
        "number" -> value is Number
        "array" -> value is List<*>
        "object" -> value is Map<*, *>
        else -> throw IllegalArgumentException("the schema names the type $type, which is not known")
    }

    private fun checkKeywords(schema: Map<String, Any?>) {
        for ((keyword, part) in schema) {
            when (keyword) {
                "properties", "\$defs" -> schema(part).values.forEach { checkKeywords(schema(it)) }
                "items", "propertyNames" -> checkKeywords(schema(part))
                "additionalProperties" -> if (part is Map<*, *>) checkKeywords(schema(part))
                "anyOf" -> schemas(part).forEach { checkKeywords(it) }
                else -> require(keyword in PLAIN) { "the schema has the keyword $keyword, which is not known" }
            }
        }
    }

    private companion object {
        val PLAIN = setOf(
            "\$schema", "\$ref", "title", "description", "type", "const", "enum", "pattern", "required",
            "minLength", "maxLength", "minimum", "maximum", "minItems",
        )

        fun decimal(number: Number): BigDecimal =
            if (number is BigInteger) BigDecimal(number) else BigDecimal(number.toString())

        fun join(path: String, name: String) = if (path.isEmpty()) name else "$path.$name"

        @Suppress("UNCHECKED_CAST")
        fun schema(value: Any?) = value as Map<String, Any?>

        fun schemas(value: Any?) = (value as List<*>).map { schema(it) }
    }
}
