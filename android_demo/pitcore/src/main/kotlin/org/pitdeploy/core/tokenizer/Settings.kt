package org.pitdeploy.core.tokenizer

import org.pitdeploy.core.InputError

/** An object of tokenizer.json: its fields by type, and errors that say which part of the file cannot be used. */
internal class Settings(private val place: String, private val fields: Map<String, Any?>) {
    val type: String get() = text("type")

    fun text(name: String): String = optionalText(name) ?: refuse("'$name' is missing or no text")

    fun optionalText(name: String): String? = fields[name] as String?

    fun flag(name: String, default: Boolean = false): Boolean =
        (fields[name] ?: default) as? Boolean ?: refuse("'$name' is not true or false")

    fun number(name: String): Int = (fields[name] as? Long)?.toInt() ?: refuse("'$name' is missing or no whole number")

    fun has(name: String): Boolean = fields[name] != null

    fun value(name: String): Any? = fields[name]

    fun items(name: String): List<Any?> = fields[name] as? List<*> ?: refuse("'$name' is missing or no list")

    fun parts(name: String): List<Settings> = items(name).mapIndexed { i, part -> of("$place.$name.$i", part) }

    fun part(name: String): Settings = of("$place.$name", fields[name])

    fun partOrNull(name: String): Settings? = if (has(name)) part(name) else null

    /** `{"String": ...}` or `{"Regex": ...}`: the pieces that match, in a text. */
    fun finder(name: String): (IntArray) -> List<IntRange> {
        val pattern = part(name)
        pattern.optionalText("String")?.let { wanted -> return { findText(it, codePoints(wanted)) } }
        val compiled = Pattern(pattern.text("Regex"))
        return compiled::findAll
    }

    fun refuse(reason: String): Nothing = throw InputError(
        "The tokenizer cannot be used: in tokenizer.json, $place, $reason; this app reads the byte-level and " +
            "SentencePiece-like BPE tokenizers of Llama, Mistral, Qwen and GPT-2.",
    )

    fun unknownType(): Nothing = refuse("the type '$type' is not supported")

    companion object {
        fun of(place: String, value: Any?): Settings {
            @Suppress("UNCHECKED_CAST")
            val fields = value as? Map<String, Any?>
            return Settings(place, fields ?: emptyMap()).also { if (fields == null) it.refuse("an object should stand") }
        }

        private fun findText(points: IntArray, wanted: IntArray): List<IntRange> {
            val found = ArrayList<IntRange>()
            var at = 0
            while (wanted.isNotEmpty() && at + wanted.size <= points.size) {
                if (wanted.indices.all { points[at + it] == wanted[it] }) {
                    found.add(at until at + wanted.size)
                    at += wanted.size
                } else {
                    at++
                }
            }
            return found
        }
    }
}
