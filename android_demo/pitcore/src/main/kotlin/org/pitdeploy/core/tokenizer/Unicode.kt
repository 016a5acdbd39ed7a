package org.pitdeploy.core.tokenizer

/** Code points as a set of ranges, for membership in logarithmic time. */
class CodePoints(ranges: List<IntRange>) {
    private val first: IntArray
    private val last: IntArray

    init {
        val sorted = ranges.sortedBy { it.first }
        first = IntArray(sorted.size) { sorted[it].first }
        last = IntArray(sorted.size) { sorted[it].last }
    }

    operator fun contains(point: Int): Boolean {
        val found = first.binarySearch(point)
        val at = if (found >= 0) found else -found - 2
        return at >= 0 && point <= last[at]
    }
}

/**
 * Unicode categories as Hugging Face's tokenizers has them (unicode.txt).
 *
 * The tables of the JVM and of Android are not used: they are of another year on each device, and a letter that one
 * does not know would be split otherwise.
 */
object Unicode {
    private val rows: Map<String, List<IntRange>> by lazy {
        val text = Unicode::class.java.getResourceAsStream("/org/pitdeploy/core/unicode.txt")!!
            .use { it.readBytes().toString(Charsets.US_ASCII) }
        text.lines().filter { it.isNotEmpty() && !it.startsWith("#") }.associate { line ->
            val parts = line.split(" ")
            parts[0] to parts.drop(1).map { range ->
                val ends = range.split("-").map { it.toInt(16) }
                ends.first()..ends.last()
            }
        }
    }

    val space: CodePoints by lazy { CodePoints(rows.getValue("space")) }
    val number: CodePoints by lazy { category("N")!! }
    val word: CodePoints by lazy {
        CodePoints(listOf("L", "M", "Nd", "Nl", "Pc").flatMap { ranges(it)!! } + rows.getValue("word"))
    }

    /** The set of `L`, `Lu`, ...; null for a name that is no general category. */
    fun category(name: String): CodePoints? = ranges(name)?.let { CodePoints(it) }

    private fun ranges(name: String): List<IntRange>? {
        if (!Regex("[LMNPSZC][a-z]?").matches(name) || name in setOf("C", "Cn", "Cs")) return null
        val found = rows.filterKeys { it[0].isUpperCase() && it.startsWith(name) }.values.flatten()
        return found.ifEmpty { null }
    }
}

/** The code points of a text; half of a surrogate pair counts as U+FFFD, as in every UTF-8 encoder that is lenient. */
fun codePoints(text: String): IntArray {
    val found = text.codePoints().toArray()
    for (i in found.indices) if (found[i] in 0xD800..0xDFFF) found[i] = 0xFFFD
    return found
}

fun text(points: IntArray, from: Int = 0, to: Int = points.size): String = String(points, from, to - from)

/** UTF-8 bytes of one code point. */
fun utf8(point: Int): ByteArray = String(Character.toChars(point)).toByteArray(Charsets.UTF_8)

/**
 * UTF-8 to text; each longest start of a character that is not completed becomes one U+FFFD. Written out because the
 * decoders of JVM and Android need not agree on how many that are.
 */
fun lenientUtf8(bytes: ByteArray): String {
    val out = StringBuilder(bytes.size)
    var at = 0
    while (at < bytes.size) {
        val first = bytes[at].toInt() and 0xFF
        val length = when (first) {
            in 0x00..0x7F -> 1
            in 0xC2..0xDF -> 2
            in 0xE0..0xEF -> 3
            in 0xF0..0xF4 -> 4
            else -> 0
        }
        var point = if (length < 2) first else first and (0x7F shr length)
        var read = if (length == 0) 0 else 1
        while (read in 1 until length && at + read < bytes.size) {
            val next = bytes[at + read].toInt() and 0xFF
            val low = if (read > 1) 0x80 else when (first) { 0xE0 -> 0xA0; 0xF0 -> 0x90; else -> 0x80 }
            val high = if (read > 1) 0xBF else when (first) { 0xED -> 0x9F; 0xF4 -> 0x8F; else -> 0xBF }
            if (next !in low..high) break
            point = (point shl 6) or (next and 0x3F)
            read++
        }
        if (length > 0 && read == length) out.appendCodePoint(point) else out.append('\uFFFD')
        at += maxOf(read, 1)
    }
    return out.toString()
}
