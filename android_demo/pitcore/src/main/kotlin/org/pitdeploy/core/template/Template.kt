package org.pitdeploy.core.template

import java.util.Date
import org.pitdeploy.core.InputError
import org.pitdeploy.core.template.Expression as E

/**
 * A chat template: the part of Jinja that models' templates use, with the text that transformers makes of it.
 *
 * A template is someone else's program. This interpreter reaches nothing but the values it is given, ends after
 * a bounded number of steps, and refuses by a sentence what it does not know: a text that is almost right would make
 * the model answer worse without anybody noticing.
 */
class Template(source: String, private val clock: () -> Date = { Date() }) {
    private val nodes: List<Node> = try {
        TemplateParser(Lexer(source).parts()).parse()
    } catch (error: StackOverflowError) {
        throw InputError("The chat template of this model cannot be used: it is nested too deeply.", error)
    }

    /** Throws [InputError], one sentence. Values are null, booleans, Long, Double, text, lists and maps. */
    fun render(variables: Map<String, Any?>): String = try {
        Run(clock).render(nodes, variables)
    } catch (error: StackOverflowError) {
        throw InputError("The chat template of this model cannot be used: it calls itself without an end.", error)
    } catch (error: IndexOutOfBoundsException) {
        throw InputError("The chat template of this model cannot be used: a function lacks an argument.", error)
    } catch (error: ClassCastException) {
        throw InputError("The chat template of this model cannot be used: a function got a value of another kind.", error)
    }
}

private class Scope(val outer: Scope?, val values: MutableMap<String, Any?> = HashMap()) {
    fun find(name: String): Any? {
        var scope: Scope? = this
        while (scope != null) {
            if (name in scope.values) return scope.values[name]
            scope = scope.outer
        }
        return Undefined("'$name'")
    }
}

private class BreakLoop : RuntimeException(null, null, false, false)

private class ContinueLoop : RuntimeException(null, null, false, false)

/** One rendering. */
private class Run(private val clock: () -> Date) {
    private val out = ArrayDeque<StringBuilder>()
    private var steps = 0
    private val functions = Functions { name, value, _ -> stop("it calls .$name() of ${Values.kind(value)}") }

    fun render(nodes: List<Node>, variables: Map<String, Any?>): String {
        val scope = Scope(Scope(null, globals()), variables.toMutableMap())
        return captured { run(nodes, scope) }
    }

    private fun globals(): MutableMap<String, Any?> = hashMapOf(
        "raise_exception" to Callable { arguments, _ -> stop("it stopped with '${Values.print(arguments.firstOrNull())}'") },
        "namespace" to Callable { arguments, named ->
            if (arguments.isNotEmpty()) stop("it calls namespace() without names")
            Namespace(named.toMutableMap())
        },
        "dict" to Callable { arguments, named -> if (arguments.isEmpty()) named else stop("it calls dict() without names") },
        "range" to Callable { arguments, _ ->
            val numbers = arguments.map { Values.long(it) }
            val first = if (numbers.size > 1) numbers[0] else 0L
            val last = if (numbers.size > 1) numbers[1] else numbers[0]
            if (numbers.size > 2 || last - first > MOST_STEPS) stop("it calls range() in a way that is not supported")
            (first until last).toList()
        },
        "strftime_now" to Callable { arguments, _ -> Dates.format(clock(), arguments[0] as String) },
    )

    private fun captured(block: () -> Unit): String {
        out.addLast(StringBuilder())
        if (out.size > MOST_DEPTH) stop("it calls itself too often")
        block()
        return out.removeLast().toString()
    }

    private fun run(nodes: List<Node>, scope: Scope) {
        for (node in nodes) {
            if (++steps > MOST_STEPS) stop("it does not come to an end")
            when (node) {
                is Node.Text -> print(node.text)
                is Node.Output -> print(Values.print(value(node.value, scope)))
                is Node.If -> run(node.branches.firstOrNull { isTrue(it.first, scope) }?.second ?: node.otherwise, scope)
                is Node.For -> loop(node, scope)
                is Node.Set -> assign(node, scope)
                is Node.SetBlock -> scope.values[node.name] = captured { run(node.body, Scope(scope)) }
                is Node.Macro -> scope.values[node.name] = macro(node, scope)
                is Node.Plain -> run(node.body, scope)
                Node.Break -> throw BreakLoop()
                Node.Continue -> throw ContinueLoop()
            }
        }
    }

    private fun print(text: String) {
        out.last().append(text)
        if (out.last().length > MOST_TEXT) stop("it makes more than $MOST_TEXT characters")
    }

    private fun assign(node: Node.Set, scope: Scope) {
        val value = value(node.value, scope)
        if (node.attribute == null) {
            scope.values[node.name] = value
            return
        }
        val space = scope.find(node.name) as? Namespace ?: stop("it sets a field of '${node.name}', which is no namespace")
        space.fields[node.attribute] = value
    }

    private fun loop(node: Node.For, scope: Scope) {
        var items = Values.items(value(node.items, scope))
        if (node.condition != null) {
            items = items.filter { item -> isTrue(node.condition, Scope(scope).also { bind(node.names, item, it) }) }
        }
        if (items.isEmpty()) return run(node.otherwise, Scope(scope))
        try {
            for (index in items.indices) {
                val inner = Scope(scope)
                bind(node.names, items[index], inner)
                inner.values["loop"] = state(items, index)
                try {
                    run(node.body, inner)
                } catch (_: ContinueLoop) {
                    continue
                }
            }
        } catch (_: BreakLoop) {
            return
        }
    }

    private fun bind(names: List<String>, item: Any?, scope: Scope) {
        if (names.size == 1) {
            scope.values[names[0]] = item
            return
        }
        val parts = Values.items(item)
        if (parts.size != names.size) stop("it takes ${parts.size} values apart into ${names.size} names")
        names.forEachIndexed { i, name -> scope.values[name] = parts[i] }
    }

    private fun state(items: List<Any?>, index: Int): Any = LoopState(
        mapOf(
            "index" to index + 1L,
            "index0" to index.toLong(),
            "revindex" to (items.size - index).toLong(),
            "revindex0" to (items.size - index - 1).toLong(),
            "first" to (index == 0),
            "last" to (index == items.size - 1),
            "length" to items.size.toLong(),
            "previtem" to if (index > 0) items[index - 1] else Undefined("the item before"),
            "nextitem" to if (index + 1 < items.size) items[index + 1] else Undefined("the next item"),
            "cycle" to Callable { arguments, _ -> arguments[index % arguments.size] },
        ),
    )

    private class LoopState(val fields: Map<String, Any?>)

    private fun macro(node: Node.Macro, scope: Scope) = Callable { arguments, named ->
        val inner = Scope(scope)
        if (arguments.size > node.parameters.size) stop("it gives '${node.name}' more arguments than it takes")
        node.parameters.forEachIndexed { i, (name, default) ->
            inner.values[name] = when {
                i < arguments.size -> arguments[i]
                name in named -> named[name]
                default != null -> value(default, inner)
                else -> Undefined("the argument '$name'")
            }
        }
        named.keys.firstOrNull { name -> node.parameters.none { it.first == name } }
            ?.let { stop("it gives '${node.name}' the argument '$it', which it lacks") }
        captured { run(node.body, inner) }
    }

    private fun isTrue(expression: E, scope: Scope) = Values.isTrue(value(expression, scope))

    private fun value(expression: E, scope: Scope): Any? {
        if (++steps > MOST_STEPS) stop("it does not come to an end")
        return when (expression) {
            is E.Literal -> expression.value
            is E.Name -> scope.find(expression.name)
            is E.ListOf -> expression.items.map { value(it, scope) }
            is E.MapOf -> expression.entries.associate { value(it.first, scope) to value(it.second, scope) }
            is E.Attribute -> attribute(value(expression.of, scope), expression.name)
            is E.Item -> {
                val of = value(expression.of, scope)
                val key = value(expression.key, scope)
                if (key is String && of !is Map<*, *>) attribute(of, key) else Values.item(of, key)
            }
            is E.Slice -> Values.slice(
                value(expression.of, scope),
                expression.start?.let { value(it, scope) },
                expression.end?.let { value(it, scope) },
                expression.step?.let { value(it, scope) },
            )
            is E.Call -> {
                val callee = value(expression.callee, scope) as? Callable
                    ?: stop("it calls ${called(expression.callee)}, which is no function here")
                callee.call(plain(expression.arguments, scope), named(expression.arguments, scope))
            }
            is E.Filter -> functions.filter(
                expression.name,
                value(expression.of, scope),
                plain(expression.arguments, scope),
                named(expression.arguments, scope),
            )
            is E.Test -> {
                val holds = functions.test(expression.name, value(expression.of, scope), plain(expression.arguments, scope))
                holds != expression.negated
            }
            is E.Unary -> unary(expression.sign, value(expression.of, scope))
            is E.Binary -> binary(expression, scope)
            is E.Choice -> when {
                isTrue(expression.condition, scope) -> value(expression.then, scope)
                expression.otherwise != null -> value(expression.otherwise, scope)
                else -> Undefined("the other branch")
            }
        }
    }

    private fun called(callee: E): String = when (callee) {
        is E.Name -> "'${callee.name}'"
        is E.Attribute -> "'.${callee.name}'"
        else -> "a value"
    }

    private fun plain(arguments: Arguments, scope: Scope) = arguments.plain.map { value(it, scope) }

    private fun named(arguments: Arguments, scope: Scope) = arguments.named.mapValues { value(it.value, scope) }

    private fun attribute(of: Any?, name: String): Any? {
        if (name.startsWith("_")) stop("it reads '$name', which leaves the sandbox")
        val methods = if (of is String) Functions.TEXT_METHODS else if (of is Map<*, *>) Functions.MAP_METHODS else emptySet()
        return when {
            name in methods -> Callable { arguments, named -> functions.method(of, name, arguments, named) }
            of is LoopState -> if (name in of.fields) of.fields[name] else stop("it reads loop.$name, which is not supported")
            of is Namespace -> if (name in of.fields) of.fields[name] else Undefined("'$name' of a namespace")
            // Python has methods here that this interpreter lacks: better no text than another one.
            of is String || of is List<*> -> stop("it reads '$name' of ${Values.kind(of)}")
            else -> Values.item(of, name)
        }
    }

    private fun unary(sign: String, value: Any?): Any = when (sign) {
        "not" -> !Values.isTrue(value)
        "-" -> Values.arithmetic("-", 0L, value)
        else -> Values.arithmetic("+", 0L, value)
    }

    private fun binary(expression: E.Binary, scope: Scope): Any? {
        val left = value(expression.left, scope)
        if (expression.sign == "and") return if (Values.isTrue(left)) value(expression.right, scope) else left
        if (expression.sign == "or") return if (Values.isTrue(left)) left else value(expression.right, scope)
        val right = value(expression.right, scope)
        return when (expression.sign) {
            "==" -> Values.equal(left, right)
            "!=" -> !Values.equal(left, right)
            "<" -> Values.compare(left, right) < 0
            "<=" -> Values.compare(left, right) <= 0
            ">" -> Values.compare(left, right) > 0
            ">=" -> Values.compare(left, right) >= 0
            "in" -> Values.contains(right, left)
            "not in" -> !Values.contains(right, left)
            "~" -> Values.print(left) + Values.print(right)
            "+" -> Values.add(left, right)
            else -> Values.arithmetic(expression.sign, left, right)
        }
    }

    private companion object {
        const val MOST_STEPS = 2_000_000
        const val MOST_DEPTH = 64
        const val MOST_TEXT = 4_000_000
    }
}
