package org.pitdeploy.core.tokenizer

/** A token that is found in the text before anything else looks at it. */
internal class AddedToken(settings: Settings) {
    val id = settings.number("id")
    val content = settings.text("content")
    val singleWord = settings.flag("single_word")
    val leftStrip = settings.flag("lstrip")
    val rightStrip = settings.flag("rstrip")
    val normalized = settings.flag("normalized")
    val special = settings.flag("special")
}

/** A run of text, or the id of an added token. */
internal class Segment(val text: String, val id: Int?, val first: Boolean)

/** Finds added tokens: of several that start at one place the longest, from left to right. */
internal class AddedTokenFinder(tokens: List<AddedToken>, content: (AddedToken) -> String) {
    private val byFirst: Map<Char, List<Pair<String, AddedToken>>> =
        tokens.map { content(it) to it }
            .filter { it.first.isNotEmpty() }
            .groupBy { it.first[0] }
            .mapValues { entry -> entry.value.sortedByDescending { it.first.length } }

    fun split(segment: Segment): List<Segment> {
        val text = segment.text
        if (byFirst.isEmpty() || segment.id != null) return listOf(segment)
        val found = ArrayList<Segment>()
        var done = 0
        var at = 0

        fun plain(end: Int) {
            if (done < end) found.add(Segment(text.substring(done, end), null, segment.first && done == 0))
        }

        while (at < text.length) {
            val match = byFirst[text[at]]?.firstOrNull { text.startsWith(it.first, at) }
            if (match == null) {
                at++
                continue
            }
            val (content, token) = match
            var start = at
            var end = at + content.length
            at = end
            if (token.singleWord && (wordBefore(text, start) || wordAfter(text, end))) continue
            if (token.leftStrip) {
                while (start > done && text.codePointBefore(start) in Unicode.space) {
                    start -= Character.charCount(text.codePointBefore(start))
                }
            }
            if (token.rightStrip) {
                while (end < text.length && text.codePointAt(end) in Unicode.space) {
                    end += Character.charCount(text.codePointAt(end))
                }
            }
            plain(start)
            found.add(Segment(text.substring(start, end), token.id, segment.first && start == 0))
            done = end
        }
        plain(text.length)
        return found
    }

    private fun wordBefore(text: String, at: Int) = at > 0 && text.codePointBefore(at) in Unicode.word

    private fun wordAfter(text: String, at: Int) = at < text.length && text.codePointAt(at) in Unicode.word
}
