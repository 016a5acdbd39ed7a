package org.pitdeploy.core.template

import org.pitdeploy.core.InputError
import org.pitdeploy.core.tokenizer.codePoints
import org.pitdeploy.core.tokenizer.text

/** A template stopped: it uses what the interpreter does not know, or raised an error itself. */
internal fun stop(reason: String): Nothing = throw InputError("The chat template of this model cannot be used: $reason.")

/** A name, key or place that is not there. It prints as nothing and is false; using it otherwise is an error. */
internal class Undefined(val what: String)

/** What `namespace(...)` makes: the only value that a template may change. */
internal class Namespace(val fields: MutableMap<String, Any?>)

internal fun interface Callable {
    fun call(arguments: List<Any?>, named: Map<String, Any?>): Any?
}

/**
 * Values as templates see them: null, Boolean, Long, Double, String, List, Map, [Undefined], [Namespace], [Callable].
 * What they mean is Python's, since templates are written for it.
 */
internal object Values {
    fun isTrue(value: Any?): Boolean = when (value) {
        null, is Undefined -> false
        is Boolean -> value
        is Long -> value != 0L
        is Double -> value != 0.0
        is String -> value.isNotEmpty()
        is Collection<*> -> value.isNotEmpty()
        is Map<*, *> -> value.isNotEmpty()
        else -> true
    }

    fun print(value: Any?): String = when (value) {
        null -> "None"
        true -> "True"
        false -> "False"
        is Undefined -> ""
        is String -> value
        is Long -> value.toString()
        is Double -> decimal(value)
        else -> stop("it prints ${kind(value)}")
    }

    fun kind(value: Any?): String = when (value) {
        null -> "none"
        is Boolean -> "true or false"
        is Long, is Double -> "a number"
        is String -> "a text"
        is List<*> -> "a list"
        is Map<*, *> -> "a mapping"
        is Undefined -> "${value.what}, which is not there"
        else -> "an object"
    }

    fun decimal(value: Double): String {
        val whole = value == Math.rint(value)
        if (!value.isFinite() || Math.abs(value) >= 1e7 || (value != 0.0 && Math.abs(value) < 1e-3)) stop("it prints the number $value")
        return if (whole) "${value.toLong()}.0" else value.toString()
    }

    fun equal(a: Any?, b: Any?): Boolean = when {
        a is Undefined || b is Undefined -> a is Undefined && b is Undefined
        isNumber(a) && isNumber(b) -> if (a is Double || b is Double) double(a) == double(b) else long(a) == long(b)
        a is List<*> && b is List<*> -> a.size == b.size && a.indices.all { equal(a[it], b[it]) }
        a is Map<*, *> && b is Map<*, *> -> a.keys == b.keys && a.keys.all { equal(a[it], b[it]) }
        else -> a == b
    }

    fun compare(a: Any?, b: Any?): Int = when {
        isNumber(a) && isNumber(b) -> double(a).compareTo(double(b))
        a is String && b is String -> comparePoints(codePoints(a), codePoints(b))
        else -> stop("it compares ${kind(a)} with ${kind(b)}")
    }

    fun contains(container: Any?, item: Any?): Boolean = when (container) {
        is String -> (item as? String ?: stop("it looks for ${kind(item)} in a text")) in container
        is List<*> -> container.any { equal(it, item) }
        is Map<*, *> -> container.keys.any { it == item }
        is Undefined -> false
        else -> stop("it looks for something in ${kind(container)}")
    }

    fun items(value: Any?): List<Any?> = when (value) {
        is List<*> -> value
        is Map<*, *> -> value.keys.toList()
        is String -> codePoints(value).map { String(Character.toChars(it)) }
        is Undefined -> emptyList()
        else -> stop("it goes through ${kind(value)}")
    }

    fun length(value: Any?): Long = when (value) {
        is String -> codePoints(value).size.toLong()
        is Collection<*> -> value.size.toLong()
        is Map<*, *> -> value.size.toLong()
        is Undefined -> 0
        else -> stop("it asks for the length of ${kind(value)}")
    }

    fun add(a: Any?, b: Any?): Any = when {
        a is String && b is String -> a + b
        a is List<*> && b is List<*> -> a + b
        else -> arithmetic("+", a, b)
    }

    fun arithmetic(sign: String, a: Any?, b: Any?): Any {
        if (sign == "*" && (a is String && b is Long || a is Long && b is String)) {
            val count = (if (a is Long) a else b as Long).coerceIn(0, 10_000).toInt()
            return (if (a is String) a else b as String).repeat(count)
        }
        if (!isNumber(a) || !isNumber(b)) stop("it computes ${kind(a)} $sign ${kind(b)}")
        val decimal = a is Double || b is Double || sign == "/"
        if (sign in setOf("/", "//", "%") && double(b) == 0.0) stop("it divides by zero")
        return when (sign) {
            "+" -> if (decimal) double(a) + double(b) else long(a) + long(b)
            "-" -> if (decimal) double(a) - double(b) else long(a) - long(b)
            "*" -> if (decimal) double(a) * double(b) else long(a) * long(b)
            "/" -> double(a) / double(b)
            "//" -> if (decimal) Math.floor(double(a) / double(b)) else Math.floorDiv(long(a), long(b))
            "%" -> if (decimal) double(a) - double(b) * Math.floor(double(a) / double(b)) else Math.floorMod(long(a), long(b))
            else -> stop("it uses the operator $sign")
        }
    }

    /** `value[key]`; a number counts from the end where it is negative. */
    fun item(value: Any?, key: Any?): Any? = when {
        value is Map<*, *> -> if (key in value) value[key] else Undefined("the key '$key'")
        value is List<*> && key is Long -> value.getOrElse(place(key, value.size)) { Undefined("place $key of a list") }
        value is String && key is Long -> {
            val points = codePoints(value)
            val at = place(key, points.size)
            if (at in points.indices) text(points, at, at + 1) else Undefined("place $key of a text")
        }
        value is Undefined -> stop("it reads from ${value.what}, which is not there")
        else -> Undefined("'$key' of ${kind(value)}")
    }

    /** `value[start:end:step]` of a list or a text. */
    fun slice(value: Any?, start: Any?, end: Any?, step: Any?): Any {
        val stride = if (step == null) 1 else long(step).toInt()
        if (stride == 0) stop("it slices with a step of 0")
        val size = length(value).toInt()
        val places = places(start, end, stride, size)
        return when (value) {
            is String -> codePoints(value).let { points -> places.joinToString("") { text(points, it, it + 1) } }
            is List<*> -> places.map { value[it] }
            else -> stop("it slices ${kind(value)}")
        }
    }

    private fun places(start: Any?, end: Any?, stride: Int, size: Int): List<Int> {
        val lowest = if (stride > 0) 0 else -1
        val highest = if (stride > 0) size else size - 1
        fun bound(value: Any?, default: Int): Int {
            if (value == null) return default
            if (value !is Long) stop("it slices with ${kind(value)}")
            return (if (value < 0) value + size else value).coerceIn(lowest.toLong(), highest.toLong()).toInt()
        }
        val from = bound(start, if (stride > 0) 0 else size - 1)
        val to = bound(end, if (stride > 0) size else -1)
        return if (stride > 0) (from until to step stride).toList() else (from downTo to + 1 step -stride).toList()
    }

    private fun place(key: Long, size: Int): Int = (if (key < 0) key + size else key).coerceIn(-1, size.toLong()).toInt()

    fun isNumber(value: Any?): Boolean = value is Long || value is Double || value is Boolean

    fun long(value: Any?): Long = when (value) {
        is Boolean -> if (value) 1 else 0
        is Long -> value
        else -> stop("a whole number should stand in place of ${kind(value)}")
    }

    private fun double(value: Any?): Double = if (value is Double) value else long(value).toDouble()

    private fun comparePoints(a: IntArray, b: IntArray): Int {
        for (i in 0 until minOf(a.size, b.size)) if (a[i] != b[i]) return a[i].compareTo(b[i])
        return a.size.compareTo(b.size)
    }

    fun json(value: Any?, indent: Long?, depth: Int = 1): String {
        fun block(open: String, close: String, parts: List<String>): String {
            if (parts.isEmpty()) return open + close
            if (indent == null) return open + parts.joinToString(", ") + close
            val line = "\n" + " ".repeat((indent * depth).toInt())
            return open + parts.joinToString(",") { line + it } + line.dropLast(indent.toInt()) + close
        }
        return when (value) {
            null -> "null"
            is Boolean, is Long -> value.toString()
            is Double -> decimal(value)
            is String -> quoted(value)
            is List<*> -> block("[", "]", value.map { json(it, indent, depth + 1) })
            is Map<*, *> -> block("{", "}", value.map { quoted(print(it.key)) + ": " + json(it.value, indent, depth + 1) })
            else -> stop("it writes ${kind(value)} as JSON")
        }
    }

    private fun quoted(text: String): String = buildString {
        append('"')
        for (c in text) {
            when (c) {
                '"' -> append("\\\"")
                '\\' -> append("\\\\")
                '\n' -> append("\\n")
                '\r' -> append("\\r")
                '\t' -> append("\\t")
                '\b' -> append("\\b")
                '\u000c' -> append("\\f")
                else -> if (c < ' ') append("\\u%04x".format(c.code)) else append(c)
            }
        }
        append('"')
    }

    // Python's white space, which is more than Java's.
    private const val SPACES = "\t\n\u000b\u000c\r\u001c\u001d\u001e\u001f \u0085\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006" +
        "\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"

    fun isSpace(c: Char): Boolean = c in SPACES

    fun strip(text: String, characters: String? = null, left: Boolean = true, right: Boolean = true): String {
        val set = characters ?: SPACES
        val trimmed = if (left) text.trimStart { it in set } else text
        return if (right) trimmed.trimEnd { it in set } else trimmed
    }

    /** `text.split()` of Python. */
    fun splitSpaces(text: String): List<String> {
        val found = ArrayList<String>()
        val part = StringBuilder()
        for (c in text) {
            if (!isSpace(c)) part.append(c)
            else if (part.isNotEmpty()) found.add(part.toString()).also { part.setLength(0) }
        }
        if (part.isNotEmpty()) found.add(part.toString())
        return found
    }
}
