package org.pitdeploy.core.template

import org.pitdeploy.core.template.Values.isSpace

internal enum class Kind { NAME, TEXT, INTEGER, DECIMAL, SIGN, END }

/** A word of an expression or tag; [value] is the text of a name or sign, or the value of a literal. */
internal class Token(val kind: Kind, val value: Any?, val line: Int) {
    fun isSign(text: String) = kind == Kind.SIGN && value == text

    fun isName(text: String) = kind == Kind.NAME && value == text
}

/** A part of a template's source. */
internal sealed class Part {
    class Data(val text: String) : Part()

    class Output(val tokens: List<Token>) : Part()

    class Tag(val tokens: List<Token>) : Part()
}

/**
 * Cuts a template into text, `{{ }}`, `{% %}` and comments, with the settings of transformers: the line break after a
 * tag and the blanks before one at a line's start are dropped, and so is the line break at the end.
 */
internal class Lexer(source: String) {
    private val text = source.replace("\r\n", "\n").replace('\r', '\n').removeSuffix("\n")
    private var at = 0

    fun parts(): List<Part> {
        val found = ArrayList<Part>()
        var lineStart = true
        var stripNext = false
        while (at < text.length) {
            val start = nextOpening()
            var data = text.substring(at, start)
            if (stripNext) data = Values.strip(data, right = false)
            if (start == text.length) {
                found.add(Part.Data(data))
                break
            }
            val opening = text.substring(start, start + 2)
            val sign = text.getOrNull(start + 2)
            data = before(data, opening, sign, lineStart && !(stripNext && data.isEmpty() && at < start))
            if (data.isNotEmpty()) found.add(Part.Data(data))
            at = start + 2 + if (sign == '-' || (sign == '+' && opening != "{{")) 1 else 0
            stripNext = body(opening, found)
            lineStart = at > 0 && text[at - 1] == '\n'
        }
        return found
    }

    private fun nextOpening(): Int {
        val places = listOf("{{", "{%", "{#").map { text.indexOf(it, at) }.filter { it >= 0 }
        return places.minOrNull() ?: text.length
    }

    private fun before(data: String, opening: String, sign: Char?, lineStart: Boolean): String {
        if (sign == '-') return Values.strip(data, left = false)
        if (sign == '+' || opening == "{{") return data
        val line = data.lastIndexOf('\n') + 1
        val blank = data.substring(line)
        return if ((line > 0 || lineStart) && blank.all { isSpace(it) }) data.substring(0, line) else data
    }

    /** Reads up to the closing of what was opened; true where the white space after it goes away. */
    private fun body(opening: String, found: MutableList<Part>): Boolean {
        if (opening == "{#") return comment()
        val closing = if (opening == "{{") "}}" else "%}"
        val tokens = ArrayList<Token>()
        while (true) {
            while (at < text.length && isSpace(text[at])) at++
            if (at >= text.length) stop("a '$opening' in line ${line()} is not closed")
            val sign = text[at]
            val signed = (sign == '-' || (sign == '+' && closing == "%}")) && text.startsWith(closing, at + 1)
            if (signed || (text.startsWith(closing, at) && !closesBrace(tokens, closing))) {
                at += if (signed) 3 else 2
                tokens.add(Token(Kind.END, null, line()))
                found.add(if (opening == "{{") Part.Output(tokens) else Part.Tag(tokens))
                if (signed && sign == '-') return true
                if (closing == "%}" && !signed) dropLineBreak()
                return false
            }
            tokens.add(token())
        }
    }

    /** Whether `}}` ends a mapping first, as in `{{ {'a': {}}}}`. */
    private fun closesBrace(tokens: List<Token>, closing: String): Boolean =
        closing == "}}" && tokens.count { it.isSign("{") } > tokens.count { it.isSign("}") }

    private fun comment(): Boolean {
        val end = text.indexOf("#}", at)
        if (end < 0) stop("a comment in line ${line()} is not closed")
        val sign = text[end - 1]
        at = end + 2
        if (sign != '-' && sign != '+') dropLineBreak()
        return sign == '-'
    }

    private fun dropLineBreak() {
        if (at < text.length && text[at] == '\n') at++
    }

    private fun token(): Token {
        val c = text[at]
        val line = line()
        if (c == '\'' || c == '"') return Token(Kind.TEXT, literal(c), line)
        NUMBER.matchAt(text, at)?.let { match ->
            at = match.range.last + 1
            val digits = match.value.replace("_", "")
            return if ('.' in digits) Token(Kind.DECIMAL, digits.toDouble(), line)
            else Token(Kind.INTEGER, digits.toLongOrNull() ?: stop("the number $digits in line $line is too large"), line)
        }
        NAME.matchAt(text, at)?.let { match ->
            at = match.range.last + 1
            return Token(Kind.NAME, match.value, line)
        }
        val sign = SIGNS.firstOrNull { text.startsWith(it, at) } ?: stop("'$c' in line $line is not understood")
        at += sign.length
        return Token(Kind.SIGN, sign, line)
    }

    private fun literal(quote: Char): String {
        val start = line()
        val out = StringBuilder()
        at++
        while (true) {
            if (at >= text.length) stop("a text in line $start is not closed")
            val c = text[at++]
            if (c == quote) return out.toString()
            if (c != '\\') out.append(c) else out.append(escape(start))
        }
    }

    private fun escape(line: Int): String {
        val c = text.getOrElse(at++) { stop("a text in line $line is not closed") }
        return when (c) {
            'n' -> "\n"
            't' -> "\t"
            'r' -> "\r"
            '\\', '\'', '"' -> c.toString()
            '\n' -> ""
            'x', 'u' -> {
                val length = if (c == 'x') 2 else 4
                val digits = text.substring(at, minOf(at + length, text.length))
                val point = digits.toIntOrNull(16)
                if (digits.length < length || point == null) stop("the escape '\\$c' in line $line lacks digits")
                at += length
                point.toChar().toString()
            }
            in "abfv01234567N" -> stop("the escape '\\$c' in line $line is not supported")
            else -> "\\$c"
        }
    }

    private fun line(): Int = 1 + text.substring(0, minOf(at, text.length)).count { it == '\n' }

    private companion object {
        val NUMBER = Regex("[0-9](?:_?[0-9])*(?:\\.[0-9]+)?")
        val NAME = Regex("[A-Za-z_][A-Za-z0-9_]*")
        val SIGNS = listOf(
            "**", "//", "==", "!=", "<=", ">=", "+", "-", "*", "/", "%", "~", "<", ">", "=",
            "(", ")", "[", "]", "{", "}", ".", ",", ":", "|",
        )
    }
}
