package org.pitdeploy.core.tokenizer

import org.pitdeploy.core.InputError
import org.pitdeploy.core.json.Json
import org.pitdeploy.core.json.JsonError

/**
 * A tokenizer.json of the kinds that our model families use, with the ids of Hugging Face's tokenizers.
 *
 * Cutting and padding that the file asks for are not done. What is not known is refused when the file is read.
 */
class Tokenizer private constructor(root: Settings) {
    private val model = Bpe(root.part("model"))
    private val normalizer = Normalizer.of(root.partOrNull("normalizer"))
    private val preTokenizer = PreTokenizer.of(root.partOrNull("pre_tokenizer"))
    private val decoder = Decoder.of(root.partOrNull("decoder"))
    private val added = if (root.has("added_tokens")) root.parts("added_tokens").map { AddedToken(it) } else emptyList()
    private val addedById = added.associateBy { it.id }
    private val plainFinder = AddedTokenFinder(added.filter { !it.normalized }) { it.content }
    private val normalizedFinder = AddedTokenFinder(added.filter { it.normalized }) { normalizer.normalize(it.content) }
    private val around = Around.of(root.partOrNull("post_processor"))

    /** 1 + the largest id. */
    val length: Int = 1 + maxOf(added.maxOfOrNull { it.id } ?: -1, model.maxId)

    /**
     * The ids of a text. Special tokens inside it become their id; with [addSpecialTokens] those that the file puts around
     * a text are added. Halves of surrogate pairs count as U+FFFD.
     */
    fun encode(text: String, addSpecialTokens: Boolean = false): IntArray {
        val whole = text(codePoints(text))
        val ids = ArrayList<Int>()
        for (segment in plainFinder.split(Segment(whole, null, true))) {
            if (segment.id != null) {
                ids.add(segment.id)
                continue
            }
            val normalized = Segment(normalizer.normalize(segment.text), null, segment.first)
            for (part in normalizedFinder.split(normalized)) {
                if (part.id != null) ids.add(part.id) else encodePlain(Piece(part.text, part.first), ids)
            }
        }
        return (if (addSpecialTokens) around.put(ids) else ids).toIntArray()
    }

    /** The text of ids, special tokens left out. An id without a token is passed over. */
    fun decode(ids: List<Int>): String {
        val tokens = ids.filter { !isSpecial(it) }.mapNotNull { token(it) }
        return if (tokens.isEmpty()) "" else decoder.decode(tokens).joinToString("")
    }

    fun token(id: Int): String? = addedById[id]?.content ?: model.token(id)

    fun id(token: String): Int? = added.firstOrNull { it.content == token }?.id ?: model.id(token)

    fun isSpecial(id: Int): Boolean = addedById[id]?.special == true

    private fun encodePlain(piece: Piece, ids: MutableList<Int>) {
        if (piece.text.isEmpty()) return
        for (word in preTokenizer.split(piece)) model.encode(word.text, ids)
    }

    /** What the post-processor puts in front of a text and behind it. */
    private class Around(val front: List<Int>, val back: List<Int>) {
        fun put(ids: List<Int>): List<Int> = front + ids + back

        companion object {
            fun of(settings: Settings?): Around = when (settings?.type) {
                null, "ByteLevel" -> Around(emptyList(), emptyList())
                "Sequence" -> settings.parts("processors").map { of(it) }
                    .fold(Around(emptyList(), emptyList())) { a, b -> Around(b.front + a.front, a.back + b.back) }
                "TemplateProcessing" -> template(settings)
                else -> settings.unknownType()
            }

            private fun template(settings: Settings): Around {
                val front = ArrayList<Int>()
                val back = ArrayList<Int>()
                var seen = false
                for (part in settings.parts("single")) {
                    if (part.has("Sequence")) {
                        if (seen) settings.refuse("the text stands twice in 'single'")
                        seen = true
                        continue
                    }
                    val name = part.part("SpecialToken").text("id")
                    val ids = settings.part("special_tokens").part(name).items("ids").map { (it as Long).toInt() }
                    (if (seen) back else front).addAll(ids)
                }
                if (!seen) settings.refuse("the text does not stand in 'single'")
                return Around(front, back)
            }
        }
    }

    companion object {
        /** Reads tokenizer.json. Throws [InputError] for a file or a setting that this app does not read. */
        fun parse(bytes: ByteArray): Tokenizer {
            val data = try {
                Json.parse(bytes)
            } catch (error: JsonError) {
                throw InputError("tokenizer.json is not valid JSON (${error.message}); export the bundle again.", error)
            }
            return Tokenizer(Settings.of("the file", data))
        }
    }
}
