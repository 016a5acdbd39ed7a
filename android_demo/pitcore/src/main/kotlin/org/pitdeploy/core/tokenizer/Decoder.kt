package org.pitdeploy.core.tokenizer

import java.io.ByteArrayOutputStream

/** Makes text of tokens, step by step: each step takes a list of texts and gives another. */
internal fun interface Decoder {
    fun decode(tokens: List<String>): List<String>

    companion object {
        private val BYTE = Regex("<0x([0-9A-Fa-f]{2})>")

        fun of(settings: Settings?): Decoder = when (settings?.type) {
            null -> Decoder { listOf(it.joinToString(" ")) }
            "Sequence" -> {
                val parts = settings.parts("decoders").map { of(it) }
                Decoder { tokens -> parts.fold(tokens) { found, part -> part.decode(found) } }
            }
            "ByteLevel" -> Decoder(::byteLevel)
            "ByteFallback" -> Decoder(::byteFallback)
            "Fuse" -> Decoder { listOf(it.joinToString("")) }
            "Replace" -> {
                val find = settings.finder("pattern")
                val content = settings.text("content")
                Decoder { tokens -> tokens.map { replaceAll(it, find, content) } }
            }
            "Strip" -> {
                val content = settings.text("content").singleOrNull() ?: settings.refuse("'content' is not one character")
                val start = settings.number("start")
                val stop = settings.number("stop")
                Decoder { tokens -> tokens.map { strip(it, content, start, stop) } }
            }
            "Metaspace" -> {
                val space = settings.text("replacement")
                val keep = settings.optionalText("prepend_scheme") == "never"
                Decoder { it.mapIndexed { i, token -> token.replace(space, if (i == 0 && !keep) "" else " ") } }
            }
            else -> settings.unknownType()
        }

        private fun byteLevel(tokens: List<String>): List<String> {
            val bytes = ByteArrayOutputStream()
            for (token in tokens) bytes.write(ByteAlphabet.decode(token) ?: token.toByteArray(Charsets.UTF_8))
            return listOf(lenientUtf8(bytes.toByteArray()))
        }

        /** A run of byte tokens is judged as a whole: a character for each byte where it is not UTF-8. */
        private fun byteFallback(tokens: List<String>): List<String> {
            val found = ArrayList<String>()
            val run = ByteArrayOutputStream()

            fun flush() {
                if (run.size() == 0) return
                val text = lenientUtf8(run.toByteArray())
                val whole = text.toByteArray(Charsets.UTF_8).contentEquals(run.toByteArray())
                if (whole) found.add(text) else repeat(run.size()) { found.add("\uFFFD") }
                run.reset()
            }

            for (token in tokens) {
                val match = BYTE.matchEntire(token)
                if (match != null) {
                    run.write(match.groupValues[1].toInt(16))
                } else {
                    flush()
                    found.add(token)
                }
            }
            flush()
            return found
        }

        private fun strip(token: String, content: Char, start: Int, stop: Int): String {
            var from = 0
            while (from < minOf(start, token.length) && token[from] == content) from++
            var to = token.length
            while (to > from && token.length - to < stop && token[to - 1] == content) to--
            return token.substring(from, to)
        }
    }
}
