package org.pitdeploy.core.tokenizer

/** A part of the text; [first] says whether it begins where the whole text begins. */
internal class Piece(val text: String, val first: Boolean)

/** Splits pieces into smaller ones, within which the model merges. */
internal fun interface PreTokenizer {
    fun split(piece: Piece): List<Piece>

    companion object {
        private const val GPT2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

        fun of(settings: Settings?): PreTokenizer = when (settings?.type) {
            null -> PreTokenizer { listOf(it) }
            "Sequence" -> {
                val parts = settings.parts("pretokenizers").map { of(it) }
                PreTokenizer { whole -> parts.fold(listOf(whole)) { pieces, part -> pieces.flatMap { part.split(it) } } }
            }
            "ByteLevel" -> byteLevel(settings)
            "Split" -> {
                val find = settings.finder("pattern")
                val invert = settings.flag("invert")
                val behavior = settings.text("behavior")
                if (behavior !in setOf("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")) {
                    settings.refuse("the behavior '$behavior' is not known")
                }
                PreTokenizer { divide(it, find, behavior, invert) }
            }
            "Digits" -> {
                val behavior = if (settings.flag("individual_digits")) "Isolated" else "Contiguous"
                PreTokenizer { divide(it, ::numbers, behavior) }
            }
            "Metaspace" -> metaspace(settings)
            else -> settings.unknownType()
        }

        private fun byteLevel(settings: Settings): PreTokenizer {
            val prefix = settings.flag("add_prefix_space", true)
            val pattern = if (settings.flag("use_regex", true)) Pattern(GPT2) else null
            return PreTokenizer { piece ->
                val text = if (prefix && !piece.text.startsWith(" ")) " " + piece.text else piece.text
                val whole = Piece(text, piece.first)
                val parts = if (pattern == null) listOf(whole) else divide(whole, pattern::findAll, "Isolated")
                parts.map { Piece(ByteAlphabet.encode(it.text), it.first) }
            }
        }

        private fun metaspace(settings: Settings): PreTokenizer {
            val space = settings.text("replacement")
            val scheme = settings.optionalText("prepend_scheme") ?: if (settings.flag("add_prefix_space", true)) "always" else "never"
            val split = settings.flag("split", true)
            val point = codePoints(space).singleOrNull() ?: settings.refuse("'replacement' is not one character")
            return PreTokenizer { piece ->
                val replaced = piece.text.replace(" ", space)
                val wanted = scheme == "always" || (scheme == "first" && piece.first)
                val whole = Piece(if (wanted && !replaced.startsWith(space)) space + replaced else replaced, piece.first)
                val find = { points: IntArray -> points.indices.filter { points[it] == point }.map { it..it } }
                if (split) divide(whole, find, "MergedWithNext") else listOf(whole)
            }
        }

        private fun numbers(points: IntArray): List<IntRange> = points.indices.filter { points[it] in Unicode.number }.map { it..it }

        /** The behaviours of tokenizers' split; empty pieces are left out. */
        private fun divide(piece: Piece, find: (IntArray) -> List<IntRange>, behavior: String, invert: Boolean = false): List<Piece> {
            val points = codePoints(piece.text)
            val marked = ArrayList<Pair<IntRange, Boolean>>()
            var at = 0
            for (match in find(points)) {
                if (at < match.first) marked.add(at until match.first to invert)
                marked.add(match to !invert)
                at = match.last + 1
            }
            if (at < points.size) marked.add(at until points.size to invert)
            return joined(marked, behavior).map { Piece(text(points, it.first, it.last + 1), piece.first && it.first == 0) }
        }

        private fun joined(marked: List<Pair<IntRange, Boolean>>, behavior: String): List<IntRange> {
            if (behavior == "Isolated") return marked.map { it.first }
            if (behavior == "Removed") return marked.filter { !it.second }.map { it.first }
            val found = ArrayList<IntRange>()
            var before: Boolean? = null
            for ((range, delimiter) in if (behavior == "MergedWithNext") marked.asReversed() else marked) {
                val join = if (behavior == "Contiguous") before == delimiter else delimiter && before == false
                if (join && found.isNotEmpty()) {
                    val other = found.removeAt(found.size - 1)
                    found.add(minOf(range.first, other.first)..maxOf(range.last, other.last))
                } else {
                    found.add(range)
                }
                before = delimiter
            }
            return if (behavior == "MergedWithNext") found.asReversed() else found
        }
    }
}

/** The 256 characters that stand for bytes in byte-level vocabularies. */
internal object ByteAlphabet {
    private val ofByte = CharArray(256)
    private val ofChar = HashMap<Char, Byte>()

    init {
        var next = 256
        for (byte in 0..255) {
            val shown = byte in 0x21..0x7E || byte in 0xA1..0xAC || byte in 0xAE..0xFF
            ofByte[byte] = (if (shown) byte else next++).toChar()
            ofChar[ofByte[byte]] = byte.toByte()
        }
    }

    fun encode(text: String): String {
        val bytes = text.toByteArray(Charsets.UTF_8)
        return String(CharArray(bytes.size) { ofByte[bytes[it].toInt() and 0xFF] })
    }

    /** The bytes of a token; null where a character of it stands for none. */
    fun decode(token: String): ByteArray? {
        val bytes = ByteArray(token.length)
        for (i in token.indices) bytes[i] = ofChar[token[i]] ?: return null
        return bytes
    }
}
