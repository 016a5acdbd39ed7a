package org.pitdeploy.core.tokenizer

import java.util.PriorityQueue

/** Byte pair encoding: the characters of a word, and the best-ranked neighbours merged until none is left. */
internal class Bpe(settings: Settings) {
    private val ids: Map<String, Int>
    private val tokens: Map<Int, String>
    private val unknown: Int?
    private val fuseUnknown = settings.flag("fuse_unk")
    private val byteFallback = settings.flag("byte_fallback")
    private val ignoreMerges = settings.flag("ignore_merges")
    private val merges = HashMap<Long, Int>()
    private val merged: IntArray

    init {
        val type = settings.optionalText("type") ?: "BPE"
        if (type != "BPE") settings.refuse("the type '$type' is not supported")
        for (name in listOf("continuing_subword_prefix", "end_of_word_suffix")) {
            if (!settings.optionalText(name).isNullOrEmpty()) settings.refuse("'$name' is not supported")
        }
        val vocabulary = settings.value("vocab") as? Map<*, *> ?: settings.refuse("'vocab' is missing or no object")
        ids = HashMap<String, Int>(vocabulary.size * 2).also { found ->
            for ((token, id) in vocabulary) {
                found[token as String] = (id as? Long)?.toInt() ?: settings.refuse("the id of '$token' is no number")
            }
        }
        tokens = ids.entries.associate { it.value to it.key }
        unknown = settings.optionalText("unk_token")?.let { ids[it] ?: settings.refuse("the token '$it' is not in 'vocab'") }
        val list = settings.items("merges")
        merged = IntArray(list.size)
        list.forEachIndexed { rank, merge ->
            val (left, right) = sides(merge) ?: settings.refuse("merge $rank is not two tokens")
            val a = ids[left]
            val b = ids[right]
            val whole = ids[left + right]
            if (a == null || b == null || whole == null) settings.refuse("merge $rank names a token that is not in 'vocab'")
            merges[pair(a, b)] = rank
            merged[rank] = whole
        }
    }

    val maxId: Int get() = tokens.keys.maxOrNull() ?: -1

    fun id(token: String): Int? = ids[token]

    fun token(id: Int): String? = tokens[id]

    /** Appends the ids of one word to [out]. */
    fun encode(word: String, out: MutableList<Int>) {
        if (word.isEmpty()) return
        if (ignoreMerges) ids[word]?.let { out.add(it).also { return } }
        Word(symbols(word)).mergeAll().forEach { out.add(it) }
    }

    private fun symbols(word: String): IntArray {
        val found = ArrayList<Int>(word.length)
        var pending = false
        fun unknown() = this.unknown?.let { found.add(it) }
        for (point in codePoints(word)) {
            val character = String(Character.toChars(point))
            val id = ids[character]
            if (id != null) {
                if (pending) unknown()
                pending = false
                found.add(id)
                continue
            }
            val bytes = if (byteFallback) utf8(point).map { ids["<0x%02X>".format(it)] } else emptyList()
            if (bytes.isNotEmpty() && null !in bytes) {
                bytes.forEach { found.add(it!!) }
            } else if (this.unknown != null) {
                if (pending && !fuseUnknown) unknown()
                pending = true
            }
        }
        if (pending) unknown()
        return found.toIntArray()
    }

    /** Symbols as a chain, with the mergeable pairs in a queue: best rank first, then leftmost. */
    private inner class Word(private val symbols: IntArray) {
        private val next = IntArray(symbols.size) { it + 1 }
        private val before = IntArray(symbols.size) { it - 1 }
        private val queue = PriorityQueue<Long>()

        fun mergeAll(): List<Int> {
            for (at in symbols.indices) offer(at)
            while (true) {
                val best = queue.poll() ?: break
                val rank = (best ushr 32).toInt()
                val at = best.toInt()
                // A pair that was merged away, or became another, is stale.
                if (rankAt(at) != rank) continue
                val right = next[at]
                symbols[at] = merged[rank]
                symbols[right] = GONE
                next[at] = next[right]
                if (next[at] < symbols.size) before[next[at]] = at
                offer(at)
                if (before[at] >= 0) offer(before[at])
            }
            return symbols.filter { it != GONE }
        }

        private fun rankAt(at: Int): Int? {
            if (symbols[at] == GONE || next[at] >= symbols.size) return null
            return merges[pair(symbols[at], symbols[next[at]])]
        }

        private fun offer(at: Int) {
            rankAt(at)?.let { queue.add((it.toLong() shl 32) or at.toLong()) }
        }
    }

    private companion object {
        const val GONE = -1

        fun pair(a: Int, b: Int): Long = (a.toLong() shl 32) or b.toLong()

        /** `"a b"` in older files, `["a", "b"]` in newer ones. */
        fun sides(merge: Any?): Pair<String, String>? = when (merge) {
            is String -> merge.split(" ").takeIf { it.size == 2 }?.let { it[0] to it[1] }
            is List<*> -> if (merge.size == 2) (merge[0] as? String)?.let { a -> (merge[1] as? String)?.let { a to it } } else null
            else -> null
        }
    }
}
