package org.pitdeploy.core.json

import java.math.BigInteger
import java.nio.ByteBuffer
import java.nio.charset.CharacterCodingException
import java.nio.charset.CodingErrorAction

/** A text is not JSON as bundles have it; [line] and [column] count from 1. */
class JsonError(message: String, val line: Int = 0, val column: Int = 0) : Exception(message)

/**
 * Reads JSON into maps, lists, strings, booleans, null, and Long, BigInteger or Double numbers.
 *
 * Stricter than the readers at hand, because a bundle is someone else's file and readers of other languages must make
 * the same of it: no repeated keys, no NaN or infinities, no halves of surrogate pairs, UTF-8 only, and whole numbers
 * stay apart from those with a fraction.
 */
object Json {
    private const val MAX_DEPTH = 512

    /** Throws [JsonError]. */
    fun parse(bytes: ByteArray): Any? {
        val decoder = Charsets.UTF_8.newDecoder()
            .onMalformedInput(CodingErrorAction.REPORT)
            .onUnmappableCharacter(CodingErrorAction.REPORT)
        val input = ByteBuffer.wrap(bytes)
        val text = try {
            decoder.decode(input).toString()
        } catch (_: CharacterCodingException) {
            throw JsonError("it is not UTF-8 at byte ${input.position()}")
        }
        return parse(text)
    }

    /** Throws [JsonError]. */
    fun parse(text: String): Any? = Parser(text).document()

    private class Parser(private val text: String) {
        private var at = 0

        fun document(): Any? {
            space()
            val value = value(0)
            space()
            if (at < text.length) fail("there is more after its end")
            return value
        }

        private fun value(depth: Int): Any? {
            if (depth > MAX_DEPTH) fail("it is nested too deeply")
            return when (peek()) {
                '{' -> members(depth)
                '[' -> items(depth)
                '"' -> string()
                't' -> word("true", true)
                'f' -> word("false", false)
                'n' -> word("null", null)
                else -> number()
            }
        }

        private fun members(depth: Int): Map<String, Any?> {
            val found = LinkedHashMap<String, Any?>()
            at++
            space()
            if (peek() == '}') {
                at++
                return found
            }
            while (true) {
                if (peek() != '"') fail("a key should start here")
                val key = string()
                if (key in found) fail("the key '${key.take(80)}' is there twice")
                space()
                expect(':')
                space()
                found[key] = value(depth + 1)
                space()
                if (peek() == '}') break
                expect(',')
                space()
            }
            at++
            return found
        }

        private fun items(depth: Int): List<Any?> {
            val found = ArrayList<Any?>()
            at++
            space()
            if (peek() == ']') {
                at++
                return found
            }
            while (true) {
                found.add(value(depth + 1))
                space()
                if (peek() == ']') break
                expect(',')
                space()
            }
            at++
            return found
        }

        private fun string(): String {
            at++
            val start = at
            while (at < text.length && text[at] != '"' && text[at] != '\\') plain()
            if (at < text.length && text[at] == '"') return paired(text.substring(start, at++))
            val built = StringBuilder(text.substring(start, at))
            while (true) {
                when (peek()) {
                    '"' -> break
                    '\\' -> built.append(escape())
                    else -> built.append(plain())
                }
            }
            at++
            return paired(built.toString())
        }

        private fun plain(): Char {
            val c = text[at]
            if (c < ' ') fail("a control character stands in a string")
            at++
            return c
        }

        private fun escape(): Char {
            at++
            val c = peek()
            at++
            return when (c) {
                '"', '\\', '/' -> c
                'b' -> '\b'
                'f' -> '\u000c'
                'n' -> '\n'
                'r' -> '\r'
                't' -> '\t'
                'u' -> {
                    val digits = text.substring(at, minOf(at + 4, text.length))
                    if (digits.length < 4 || !digits.all { it in "0123456789abcdefABCDEF" }) fail("\\u needs four digits")
                    at += 4
                    digits.toInt(16).toChar()
                }
                else -> fail("the escape \\$c is not known")
            }
        }

        private fun paired(value: String): String {
            var i = 0
            while (i < value.length) {
                val c = value[i]
                val pair = c.isHighSurrogate() && i + 1 < value.length && value[i + 1].isLowSurrogate()
                if (c.isSurrogate() && !pair) fail("an escape in it is half a surrogate pair, which is no character")
                i += if (pair) 2 else 1
            }
            return value
        }

        private fun number(): Any {
            val match = NUMBER.matchAt(text, at) ?: fail(if (at < text.length) "a value should start here" else "it ends too early")
            at = match.range.last + 1
            val digits = match.value
            if (match.groupValues[1].isEmpty() && match.groupValues[2].isEmpty()) {
                return digits.toLongOrNull() ?: BigInteger(digits)
            }
            val value = digits.toDouble()
            if (value.isInfinite()) fail("the number $digits is too large")
            return value
        }

        private fun <T> word(word: String, value: T): T {
            if (!text.startsWith(word, at)) fail("a value should start here")
            at += word.length
            return value
        }

        private fun peek(): Char = if (at < text.length) text[at] else fail("it ends too early")

        private fun expect(c: Char) {
            if (peek() != c) fail("'$c' should stand here")
            at++
        }

        private fun space() {
            while (at < text.length && text[at] in " \t\n\r") at++
        }

        private fun fail(reason: String): Nothing {
            val before = text.substring(0, minOf(at, text.length))
            throw JsonError(reason, 1 + before.count { it == '\n' }, before.length - before.lastIndexOf('\n'))
        }
    }

    private val NUMBER = Regex("-?(?:0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?")
}
