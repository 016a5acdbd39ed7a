package org.pitdeploy.core.tokenizer

import java.text.Normalizer as JavaNormalizer

/** Changes a text before it is split. */
internal fun interface Normalizer {
    fun normalize(text: String): String

    companion object {
        fun of(settings: Settings?): Normalizer = when (settings?.type) {
            null -> Normalizer { it }
            "Sequence" -> {
                val parts = settings.parts("normalizers").map { of(it) }
                Normalizer { text -> parts.fold(text) { found, part -> part.normalize(found) } }
            }
            "NFC", "NFD", "NFKC", "NFKD" -> {
                val form = JavaNormalizer.Form.valueOf(settings.type)
                Normalizer { JavaNormalizer.normalize(it, form) }
            }
            "Prepend" -> settings.text("prepend").let { front -> Normalizer { if (it.isEmpty()) it else front + it } }
            "Replace" -> {
                val find = settings.finder("pattern")
                val content = settings.text("content")
                Normalizer { replaceAll(it, find, content) }
            }
            else -> settings.unknownType()
        }
    }
}

internal fun replaceAll(text: String, find: (IntArray) -> List<IntRange>, content: String): String {
    val points = codePoints(text)
    val out = StringBuilder()
    var at = 0
    for (match in find(points)) {
        out.append(text(points, at, match.first)).append(content)
        at = match.last + 1
    }
    return out.append(text(points, at)).toString()
}
