package org.pitdeploy.core.json

/** JSON text of maps, lists, strings, numbers, booleans and null. Throws IllegalArgumentException for NaN and infinities. */
fun toJson(value: Any?, indent: Int = 0): String = StringBuilder().also { write(it, value, indent, 0) }.toString()

private fun write(out: StringBuilder, value: Any?, indent: Int, depth: Int) {
    when (value) {
        null, is Boolean -> out.append(value)
        is String -> quote(out, value)
        is Int, is Long -> out.append(value)
        is Number -> out.append(decimal(value.toDouble()))
        is Map<*, *> -> block(out, '{', '}', value.entries, indent, depth) { (key, item) ->
            quote(out, key as String)
            out.append(if (indent > 0) ": " else ":")
            write(out, item, indent, depth + 1)
        }
        is Iterable<*> -> block(out, '[', ']', value.toList(), indent, depth) { write(out, it, indent, depth + 1) }
        else -> throw IllegalArgumentException("${value::class.simpleName} has no form in JSON")
    }
}

private fun decimal(value: Double): String {
    require(value.isFinite()) { "$value is no JSON number" }
    return if (value == Math.rint(value) && Math.abs(value) < 1e15) "${value.toLong()}.0" else value.toString()
}

private fun <T> block(
    out: StringBuilder,
    open: Char,
    close: Char,
    items: Collection<T>,
    indent: Int,
    depth: Int,
    item: (T) -> Unit,
) {
    out.append(open)
    items.forEachIndexed { number, it ->
        if (number > 0) out.append(',')
        newLine(out, indent, depth + 1)
        item(it)
    }
    if (items.isNotEmpty()) newLine(out, indent, depth)
    out.append(close)
}

private fun newLine(out: StringBuilder, indent: Int, depth: Int) {
    if (indent > 0) {
        out.append('\n')
        repeat(indent * depth) { out.append(' ') }
    }
}

private fun quote(out: StringBuilder, text: String) {
    out.append('"')
    for (c in text) {
        when {
            c == '"' || c == '\\' -> out.append('\\').append(c)
            c == '\n' -> out.append("\\n")
            c < ' ' || c.isSurrogate() || c == '\u2028' || c == '\u2029' -> out.append("\\u%04x".format(c.code))
            else -> out.append(c)
        }
    }
    out.append('"')
}
