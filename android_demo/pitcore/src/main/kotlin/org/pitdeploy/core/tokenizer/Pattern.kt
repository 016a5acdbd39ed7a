package org.pitdeploy.core.tokenizer

import org.pitdeploy.core.InputError

/**
 * The regular expressions of pre-tokenizers: alternatives, groups, classes, general categories, greedy, lazy and
 * possessive repetition, lookahead and `(?i:...)`. Anything else is refused when the tokenizer is read.
 *
 * java.util.regex is not used: Android's has another engine and other Unicode tables than the JVM's, so what was tested
 * here would not be what runs there.
 */
class Pattern(private val source: String) {
    private val root: Node = Parser().parse()

    /** The matches in `points`, as in a scan from left to right; empty ones are left out. */
    fun findAll(points: IntArray): List<IntRange> {
        val found = ArrayList<IntRange>()
        var at = 0
        while (at < points.size) {
            val end = root.match(points, at) { it }
            if (end > at) {
                found.add(at until end)
                at = end
            } else {
                at++
            }
        }
        return found
    }

    /** Matches at a place and calls [next] with the end of each way to match, until one gives an end that is not -1. */
    private fun interface Node {
        fun match(points: IntArray, at: Int, next: (Int) -> Int): Int
    }

    private class Single(val accepts: (Int) -> Boolean) : Node {
        override fun match(points: IntArray, at: Int, next: (Int) -> Int): Int =
            if (at < points.size && accepts(points[at])) next(at + 1) else -1
    }

    private class Sequence(val parts: List<Node>) : Node {
        override fun match(points: IntArray, at: Int, next: (Int) -> Int): Int = from(0, points, at, next)

        private fun from(part: Int, points: IntArray, at: Int, next: (Int) -> Int): Int =
            if (part == parts.size) next(at) else parts[part].match(points, at) { from(part + 1, points, it, next) }
    }

    private class Alternatives(val parts: List<Node>) : Node {
        override fun match(points: IntArray, at: Int, next: (Int) -> Int): Int {
            for (part in parts) {
                val end = part.match(points, at, next)
                if (end >= 0) return end
            }
            return -1
        }
    }

    private class Look(val inner: Node, val wanted: Boolean) : Node {
        override fun match(points: IntArray, at: Int, next: (Int) -> Int): Int =
            if ((inner.match(points, at) { it } >= 0) == wanted) next(at) else -1
    }

    private enum class Mode { GREEDY, LAZY, POSSESSIVE }

    /** Repetition of one character: a loop, so that a long run costs no stack. */
    private class Run(val inner: Single, val min: Int, val max: Int, val mode: Mode) : Node {
        override fun match(points: IntArray, at: Int, next: (Int) -> Int): Int {
            val last = if (max == Int.MAX_VALUE) points.size else minOf(points.size.toLong(), at.toLong() + max).toInt()
            if (mode == Mode.LAZY) {
                var end = at
                while (true) {
                    if (end - at >= min) next(end).let { if (it >= 0) return it }
                    if (end >= last || !inner.accepts(points[end])) return -1
                    end++
                }
            }
            var end = at
            while (end < last && inner.accepts(points[end])) end++
            if (mode == Mode.POSSESSIVE) return if (end - at >= min) next(end) else -1
            while (end - at >= min) {
                next(end).let { if (it >= 0) return it }
                end--
            }
            return -1
        }
    }

    private class Repeat(val inner: Node, val min: Int, val max: Int, val mode: Mode) : Node {
        override fun match(points: IntArray, at: Int, next: (Int) -> Int): Int {
            if (mode != Mode.POSSESSIVE) return more(points, at, 0, next)
            val end = more(points, at, 0) { it }
            return if (end >= 0) next(end) else -1
        }

        private fun more(points: IntArray, at: Int, done: Int, next: (Int) -> Int): Int {
            if (mode == Mode.LAZY && done >= min) next(at).let { if (it >= 0) return it }
            if (done < max) {
                val end = inner.match(points, at) { if (it == at) -1 else more(points, it, done + 1, next) }
                if (end >= 0) return end
            }
            return if (mode != Mode.LAZY && done >= min) next(at) else -1
        }
    }

    private inner class Parser {
        private val text = codePoints(source)
        private var at = 0
        private var ignoreCase = false

        fun parse(): Node {
            val node = alternatives()
            if (at < text.size) refuse("a ')' closes nothing")
            return node
        }

        private fun alternatives(): Node {
            val parts = mutableListOf(sequence())
            while (take('|')) parts.add(sequence())
            return parts.singleOrNull() ?: Alternatives(parts)
        }

        private fun sequence(): Node {
            val parts = ArrayList<Node>()
            while (at < text.size && !ahead('|') && !ahead(')')) parts.add(repeated(atom()))
            return parts.singleOrNull() ?: Sequence(parts)
        }

        private fun repeated(inner: Node): Node {
            val (min, max) = when {
                take('?') -> 0 to 1
                take('*') -> 0 to Int.MAX_VALUE
                take('+') -> 1 to Int.MAX_VALUE
                take('{') -> counts()
                else -> return inner
            }
            val mode = if (take('?')) Mode.LAZY else if (take('+')) Mode.POSSESSIVE else Mode.GREEDY
            if (at < text.size && (ahead('*') || ahead('?') || ahead('+') || ahead('{'))) refuse("two repetitions follow each other")
            return if (inner is Single) Run(inner, min, max, mode) else Repeat(inner, min, max, mode)
        }

        private fun counts(): Pair<Int, Int> {
            val start = at
            while (at < text.size && !ahead('}')) at++
            val match = Regex("(\\d{1,4})(,(\\d{0,4}))?").matchEntire(text(text, start, at))
            if (match == null || !take('}')) refuse("'{' is not followed by numbers")
            val min = match.groupValues[1].toInt()
            val max = if (match.groupValues[2].isEmpty()) min else match.groupValues[3].toIntOrNull() ?: Int.MAX_VALUE
            return min to max
        }

        private fun atom(): Node {
            val point = text[at++]
            return when (point.toChar()) {
                '(' -> group()
                '[' -> single(characterClass())
                '\\' -> single(escape())
                '.' -> Single { it != '\n'.code }
                '^', '$', '*', '+', '?', '{' -> refuse("'${String(Character.toChars(point))}' is not supported here")
                else -> single(literal(point))
            }
        }

        private fun group(): Node {
            if (!take('?')) return closed(alternatives())
            if (take(':')) return closed(alternatives())
            if (take('=')) return closed(Look(alternatives(), true))
            if (take('!')) return closed(Look(alternatives(), false))
            if (take('i') && take(':')) {
                val before = ignoreCase
                ignoreCase = true
                return closed(alternatives()).also { ignoreCase = before }
            }
            refuse("a group of this kind is not supported")
        }

        private fun closed(node: Node): Node {
            if (!take(')')) refuse("a '(' is not closed")
            return node
        }

        private fun single(accepts: (Int) -> Boolean): Node {
            if (!ignoreCase) return Single(accepts)
            return Single { point ->
                val upper = Character.toUpperCase(point)
                accepts(point) || accepts(upper) || accepts(Character.toLowerCase(point)) || accepts(Character.toLowerCase(upper))
            }
        }

        private fun literal(wanted: Int): (Int) -> Boolean = { it == wanted }

        private fun characterClass(): (Int) -> Boolean {
            val negated = take('^')
            val parts = ArrayList<(Int) -> Boolean>()
            while (true) {
                if (at >= text.size) refuse("a '[' is not closed")
                if (take(']')) break
                if (ahead('[') || (ahead('&') && at + 1 < text.size && text[at + 1] == '&'.code)) {
                    refuse("a class inside a class is not supported")
                }
                parts.add(classPart())
            }
            if (parts.isEmpty()) refuse("a class is empty")
            return { point -> parts.any { it(point) } != negated }
        }

        private fun classPart(): (Int) -> Boolean {
            val first = text[at++]
            val set = if (first == '\\'.code) escapedSet() else null
            if (set != null) return set
            val low = if (first == '\\'.code) escapedPoint() else first
            if (!(ahead('-') && at + 1 < text.size && text[at + 1] != ']'.code)) return literal(low)
            at++
            val end = text[at++]
            val high = if (end == '\\'.code) escapedPoint() else end
            if (high < low) refuse("a range ends before it starts")
            return { it in low..high }
        }

        private fun escape(): (Int) -> Boolean = escapedSet() ?: literal(escapedPoint())

        /** `\s`, `\d`, `\p{...}` and their opposites; null for the escape of one character. */
        private fun escapedSet(): ((Int) -> Boolean)? {
            if (at >= text.size) refuse("it ends in a backslash")
            val kind = text[at].toChar()
            val set = when (kind) {
                's', 'S' -> Unicode.space
                'd', 'D' -> Unicode.category("Nd")!!
                'p', 'P' -> null
                else -> return null
            }
            at++
            val found = set ?: property()
            return if (kind.isUpperCase()) { point -> point !in found } else { point -> point in found }
        }

        private fun property(): CodePoints {
            val start = at
            while (at < text.size && !ahead('}')) at++
            val name = text(text, start, at).removePrefix("{")
            if (!take('}')) refuse("'\\p' is not followed by a name in braces")
            return Unicode.category(name) ?: refuse("the property '$name' is not supported")
        }

        private fun escapedPoint(): Int {
            val point = text[at++]
            return when (val c = point.toChar()) {
                'r' -> '\r'.code
                'n' -> '\n'.code
                't' -> '\t'.code
                'f' -> 0x0C
                'v' -> 0x0B
                else -> if (c.isLetterOrDigit()) refuse("the escape '\\$c' is not supported") else point
            }
        }

        private fun ahead(c: Char) = at < text.size && text[at] == c.code

        private fun take(c: Char): Boolean = ahead(c).also { if (it) at++ }

        private fun refuse(reason: String): Nothing = throw InputError(
            "The tokenizer's pattern '$source' cannot be used: $reason (at character ${at + 1}); this app reads the patterns " +
                "of Llama, Mistral, Qwen and GPT-2 tokenizers.",
        )
    }
}
