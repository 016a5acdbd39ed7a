package org.pitdeploy.core.template

import org.pitdeploy.core.template.Expression as E

/** Reads expressions, with Jinja's order of operators. */
internal class ExpressionParser(private val tokens: List<Token>) {
    private var at = 0

    val here: Token get() = tokens[at]

    fun expression(): E {
        val then = or()
        if (!takeName("if")) return then
        val condition = or()
        return E.Choice(condition, then, if (takeName("else")) expression() else null)
    }

    /** Items between commas are a list, as in `for x in a, b`. */
    fun expressionOrTuple(): E {
        val first = expression()
        if (!here.isSign(",")) return first
        val items = mutableListOf(first)
        while (take(",")) if (here.kind != Kind.END) items.add(expression())
        return E.ListOf(items)
    }

    fun or(): E {
        var left = and()
        while (takeName("or")) left = E.Binary("or", left, and())
        return left
    }

    private fun and(): E {
        var left = not()
        while (takeName("and")) left = E.Binary("and", left, not())
        return left
    }

    private fun not(): E = if (takeName("not")) E.Unary("not", not()) else comparison()

    private fun comparison(): E {
        val first = sum()
        var found: E? = null
        var left = first
        while (true) {
            val sign = when {
                here.kind == Kind.SIGN && here.value in setOf("==", "!=", "<", "<=", ">", ">=") -> next().value as String
                takeName("in") -> "in"
                here.isName("not") && tokens[at + 1].isName("in") -> "not in".also { at += 2 }
                else -> return found ?: first
            }
            val right = sum()
            val link = E.Binary(sign, left, right)
            found = if (found == null) link else E.Binary("and", found, link)
            left = right
        }
    }

    private fun sum(): E = binary(setOf("+", "-"), ::joined)

    private fun joined(): E = binary(setOf("~"), ::product)

    private fun product(): E = binary(setOf("*", "/", "//", "%"), ::power)

    private fun power(): E {
        val left = unary(true)
        if (here.isSign("**")) refuse("the operator ** is not supported")
        return left
    }

    private fun binary(signs: Set<String>, inner: () -> E): E {
        var left = inner()
        while (here.kind == Kind.SIGN && here.value in signs) left = E.Binary(next().value as String, left, inner())
        return left
    }

    private fun unary(withFilters: Boolean): E {
        val sign = if (here.isSign("-") || here.isSign("+")) next().value as String else null
        val value = if (sign != null) E.Unary(sign, unary(false)) else postfix(primary())
        return if (withFilters) filters(value) else value
    }

    private fun primary(): E {
        val token = next()
        return when (token.kind) {
            Kind.NAME -> when (token.value) {
                "true", "True" -> E.Literal(true)
                "false", "False" -> E.Literal(false)
                "none", "None" -> E.Literal(null)
                in RESERVED -> refuse("'${token.value}' stands where a value should", token)
                else -> E.Name(token.value as String)
            }
            Kind.TEXT -> {
                val text = StringBuilder(token.value as String)
                while (here.kind == Kind.TEXT) text.append(next().value as String)
                E.Literal(text.toString())
            }
            Kind.INTEGER, Kind.DECIMAL -> E.Literal(token.value)
            Kind.SIGN -> when (token.value) {
                "(" -> parenthesis()
                "[" -> E.ListOf(listUntil("]"))
                "{" -> mapping()
                else -> refuse("'${token.value}' stands where a value should", token)
            }
            Kind.END -> refuse("an expression ends too early", token)
        }
    }

    private fun parenthesis(): E {
        if (take(")")) return E.ListOf(emptyList())
        val first = expression()
        if (take(")")) return first
        expect(",")
        return E.ListOf(listOf(first) + listUntil(")"))
    }

    private fun listUntil(end: String): List<E> {
        val items = ArrayList<E>()
        while (!take(end)) {
            items.add(expression())
            if (!here.isSign(end)) expect(",")
        }
        return items
    }

    private fun mapping(): E {
        val entries = ArrayList<Pair<E, E>>()
        while (!take("}")) {
            val key = expression()
            expect(":")
            entries.add(key to expression())
            if (!here.isSign("}")) expect(",")
        }
        return E.MapOf(entries)
    }

    private fun postfix(start: E): E {
        var value = start
        while (true) {
            value = when {
                take(".") -> attribute(value)
                take("[") -> subscript(value)
                take("(") -> E.Call(value, arguments())
                else -> return value
            }
        }
    }

    private fun attribute(of: E): E {
        val token = next()
        if (token.kind == Kind.INTEGER) return E.Item(of, E.Literal(token.value))
        if (token.kind != Kind.NAME) refuse("a name should follow a dot", token)
        return E.Attribute(of, token.value as String)
    }

    private fun subscript(of: E): E {
        val start = if (here.isSign(":")) null else expression()
        if (start != null && take("]")) return E.Item(of, start)
        expect(":")
        val end = if (here.isSign(":") || here.isSign("]")) null else expression()
        val step = if (take(":") && !here.isSign("]")) expression() else null
        expect("]")
        return E.Slice(of, start, end, step)
    }

    private fun filters(start: E): E {
        var value = start
        while (true) {
            value = when {
                take("|") -> E.Filter(value, name(), if (take("(")) arguments() else NONE)
                takeName("is") -> test(value)
                take("(") -> E.Call(value, arguments())
                else -> return value
            }
        }
    }

    private fun test(of: E): E {
        val negated = takeName("not")
        val name = name()
        val bare = here.kind in setOf(Kind.TEXT, Kind.INTEGER, Kind.DECIMAL) || here.isSign("[") || here.isSign("{") ||
            (here.kind == Kind.NAME && here.value !in setOf("else", "or", "and", "is", "if", "not", "in"))
        val arguments = when {
            take("(") -> arguments()
            bare -> Arguments(listOf(postfix(primary())), emptyMap())
            else -> NONE
        }
        return E.Test(of, name, arguments, negated)
    }

    private fun arguments(): Arguments {
        val plain = ArrayList<E>()
        val named = LinkedHashMap<String, E>()
        while (!take(")")) {
            if (here.isSign("*") || here.isSign("**")) refuse("arguments with a star are not supported")
            if (here.kind == Kind.NAME && tokens[at + 1].isSign("=")) {
                val name = name()
                expect("=")
                named[name] = expression()
            } else {
                plain.add(expression())
            }
            if (!here.isSign(")")) expect(",")
        }
        return Arguments(plain, named)
    }

    fun name(): String {
        val token = next()
        if (token.kind != Kind.NAME) refuse("a name should stand here", token)
        return token.value as String
    }

    fun next(): Token = tokens[at].also { if (it.kind != Kind.END) at++ }

    fun take(sign: String): Boolean = here.isSign(sign).also { if (it) at++ }

    fun takeName(name: String): Boolean = here.isName(name).also { if (it) at++ }

    fun expect(sign: String) {
        if (!take(sign)) refuse("'$sign' should stand here")
    }

    fun expectEnd() {
        if (here.kind != Kind.END) refuse("'${here.value}' is not expected here")
    }

    fun refuse(reason: String, token: Token = here): Nothing = stop("in line ${token.line}, $reason")

    private companion object {
        val NONE = Arguments(emptyList(), emptyMap())
        val RESERVED = setOf("and", "or", "not", "in", "is", "if", "else", "elif")
    }
}

/** Reads a whole template. */
internal class TemplateParser(private val parts: List<Part>) {
    private var at = 0

    fun parse(): List<Node> {
        val nodes = until()
        if (at < parts.size) stop("the tag '${tagName()}' has no beginning")
        return nodes
    }

    /** Nodes up to a tag of one of [ends], which stays; without [ends] up to the first tag that begins nothing. */
    private fun until(vararg ends: String): List<Node> {
        val nodes = ArrayList<Node>()
        while (at < parts.size) {
            when (val part = parts[at]) {
                is Part.Data -> nodes.add(Node.Text(part.text)).also { at++ }
                is Part.Output -> {
                    val parser = ExpressionParser(part.tokens)
                    nodes.add(Node.Output(parser.expression()))
                    parser.expectEnd()
                    at++
                }
                is Part.Tag -> {
                    val name = tagName()
                    if (name in ends || name in ENDS) return nodes
                    nodes.add(tag(name, part))
                }
            }
        }
        if (ends.isNotEmpty()) stop("the template ends before ${ends.last()}")
        return nodes
    }

    private fun tagName(): String = ExpressionParser((parts[at] as Part.Tag).tokens).name()

    private fun tag(name: String, part: Part.Tag): Node {
        val parser = ExpressionParser(part.tokens).also { it.next() }
        at++
        return when (name) {
            "if" -> branches(parser)
            "for" -> loop(parser)
            "set" -> assignment(parser)
            "macro" -> macro(parser)
            "generation" -> Node.Plain(body(parser, "endgeneration"))
            "break" -> Node.Break.also { parser.expectEnd() }
            "continue" -> Node.Continue.also { parser.expectEnd() }
            else -> parser.refuse("the tag '$name' is not supported")
        }
    }

    private fun branches(first: ExpressionParser): Node {
        val found = ArrayList<Pair<E, List<Node>>>()
        var parser = first
        while (true) {
            val condition = parser.expressionOrTuple()
            parser.expectEnd()
            found.add(condition to until("elif", "else", "endif"))
            parser = head()
            if (parser.takeName("elif")) continue
            val otherwise = if (parser.takeName("else")) {
                parser.expectEnd()
                until("endif").also { parser = head() }
            } else {
                emptyList()
            }
            end(parser, "endif")
            return Node.If(found, otherwise)
        }
    }

    private fun loop(parser: ExpressionParser): Node {
        val names = mutableListOf(parser.name())
        while (parser.take(",")) names.add(parser.name())
        if (!parser.takeName("in")) parser.refuse("'in' should stand here")
        val items = parser.or()
        val condition = if (parser.takeName("if")) parser.expression() else null
        parser.expectEnd()
        val body = until("else", "endfor")
        var last = head()
        val otherwise = if (last.takeName("else")) {
            last.expectEnd()
            until("endfor").also { last = head() }
        } else {
            emptyList()
        }
        end(last, "endfor")
        return Node.For(names, items, condition, body, otherwise)
    }

    private fun assignment(parser: ExpressionParser): Node {
        val name = parser.name()
        val attribute = if (parser.take(".")) parser.name() else null
        if (!parser.take("=")) {
            if (attribute != null) parser.refuse("'=' should stand here")
            return Node.SetBlock(name, body(parser, "endset"))
        }
        val value = parser.expressionOrTuple()
        parser.expectEnd()
        return Node.Set(name, attribute, value)
    }

    private fun macro(parser: ExpressionParser): Node {
        val name = parser.name()
        val parameters = ArrayList<Pair<String, E?>>()
        parser.expect("(")
        while (!parser.take(")")) {
            val parameter = parser.name()
            parameters.add(parameter to if (parser.take("=")) parser.expression() else null)
            if (!parser.here.isSign(")")) parser.expect(",")
        }
        return Node.Macro(name, parameters, body(parser, "endmacro"))
    }

    private fun body(parser: ExpressionParser, end: String): List<Node> {
        parser.expectEnd()
        return until(end).also { end(head(), end) }
    }

    private fun head(): ExpressionParser = ExpressionParser((parts[at++] as Part.Tag).tokens)

    private fun end(parser: ExpressionParser, name: String) {
        if (!parser.takeName(name)) parser.refuse("'$name' should stand here")
    }

    private companion object {
        val ENDS = setOf("elif", "else", "endif", "endfor", "endset", "endmacro", "endgeneration")
    }
}
