package org.pitdeploy.core.tokenizer

/**
 * Text from ids as they come: [push] gives what is final, [finish] the rest. All pieces joined equal the tokenizer's
 * text of all ids.
 *
 * A character whose bytes are not complete is held back, and so is a run of byte tokens until another token ends it.
 * Each push decodes a window of a few tokens, so the cost is linear.
 */
class TextStream(private val tokenizer: Tokenizer) {
    private var window = ArrayList<Int>()
    private var given = 0

    fun push(id: Int): String {
        val token = tokenizer.token(id)
        if (token == null || tokenizer.isSpecial(id)) return ""
        window.add(id)
        if (BYTE.matches(token)) return ""
        val text = advance(tokenizer.decode(window).removeSuffix(REPLACEMENT))
        if (window.size > 2 * CONTEXT) {
            window = ArrayList(window.takeLast(CONTEXT))
            given = tokenizer.decode(window).removeSuffix(REPLACEMENT).length
        }
        return text
    }

    /** What was held back; the stream starts anew. */
    fun finish(): String {
        val text = advance(tokenizer.decode(window))
        window = ArrayList()
        given = 0
        return text
    }

    private fun advance(text: String): String {
        val new = text.drop(given)
        given = maxOf(given, text.length)
        return new
    }

    private companion object {
        val BYTE = Regex("<0x[0-9A-Fa-f]{2}>")
        const val REPLACEMENT = "\uFFFD"

        /** Tokens kept before the new one: a cut-off character needs 3. */
        const val CONTEXT = 8
    }
}
