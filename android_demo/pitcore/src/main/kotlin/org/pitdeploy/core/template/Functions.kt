package org.pitdeploy.core.template

/** Filters, tests and methods that chat templates use, with the meaning that Jinja and Python give them. */
internal class Functions(private val call: (name: String, value: Any?, List<Any?>) -> Any?) {
    fun filter(name: String, value: Any?, arguments: List<Any?>, named: Map<String, Any?>): Any? {
        fun argument(place: Int, name: String): Any? = arguments.getOrElse(place) { named[name] }
        fun text() = Values.print(value)
        return when (name) {
            "trim" -> Values.strip(text(), argument(0, "chars") as String?)
            "length", "count" -> Values.length(value)
            "upper" -> text().uppercase()
            "lower" -> text().lowercase()
            "capitalize" -> capitalized(text())
            "title" -> WORD_STARTS.split(text()).let { parts -> titled(text(), parts) }
            "replace" -> text().replace(Values.print(argument(0, "old")), Values.print(argument(1, "new")))
            "string", "safe" -> text()
            "int" -> if (value is String) value.trim().toLongOrNull() ?: 0L else Values.long(value)
            "list" -> Values.items(value)
            "first" -> Values.items(value).firstOrNull() ?: Undefined("the first item")
            "last" -> Values.items(value).lastOrNull() ?: Undefined("the last item")
            "reverse" -> if (value is String) Values.slice(value, null, null, -1L) else Values.items(value).reversed()
            "items" -> if (value is Undefined) emptyList<Any?>() else method(value, "items", emptyList(), emptyMap())
            "join" -> {
                val of = argument(1, "attribute")
                Values.items(value).joinToString(Values.print(argument(0, "d") ?: "")) {
                    Values.print(if (of == null) it else Values.item(it, of))
                }
            }
            "default", "d" -> {
                val instead = argument(0, "default_value") ?: ""
                val missing = value is Undefined || (Values.isTrue(argument(1, "boolean")) && !Values.isTrue(value))
                if (missing) instead else value
            }
            "tojson" -> Values.json(value, argument(0, "indent") as Long?)
            "map" -> {
                val of = named["attribute"]
                if (of != null) Values.items(value).map { Values.item(it, of) }
                else Values.items(value).map { filter(arguments[0] as String, it, arguments.drop(1), named) }
            }
            "selectattr", "rejectattr" -> {
                val wanted = name == "selectattr"
                Values.items(value).filter { item ->
                    val found = Values.item(item, arguments[0])
                    val holds = if (arguments.size < 2) Values.isTrue(found) else test(arguments[1] as String, found, arguments.drop(2))
                    holds == wanted
                }
            }
            else -> stop("it uses the filter '$name', which this app does not know")
        }
    }

    fun test(name: String, value: Any?, arguments: List<Any?>): Boolean = when (name) {
        "defined" -> value !is Undefined
        "undefined" -> value is Undefined
        "none" -> value == null
        "string" -> value is String
        "number" -> Values.isNumber(value)
        "integer" -> value is Long
        "boolean" -> value is Boolean
        "true" -> value == true
        "false" -> value == false
        "mapping" -> value is Map<*, *>
        "sequence", "iterable" -> value is String || value is List<*> || value is Map<*, *> || value is Undefined
        "callable" -> value is Callable
        "odd" -> Values.long(value) % 2 != 0L
        "even" -> Values.long(value) % 2 == 0L
        "equalto", "eq", "==" -> Values.equal(value, arguments[0])
        "ne", "!=" -> !Values.equal(value, arguments[0])
        "in" -> Values.contains(arguments[0], value)
        "lower" -> value is String && value == value.lowercase() && value != value.uppercase()
        "upper" -> value is String && value == value.uppercase() && value != value.lowercase()
        else -> stop("it uses the test '$name', which this app does not know")
    }

    /** `value.name(...)` of a text, a list or a mapping. */
    fun method(value: Any?, name: String, arguments: List<Any?>, named: Map<String, Any?>): Any? = when (value) {
        is String -> textMethod(value, name, arguments, named)
        is Map<*, *> -> when (name) {
            "items" -> value.entries.map { listOf(it.key, it.value) }
            "keys" -> value.keys.toList()
            "values" -> value.values.toList()
            "get" -> if (arguments[0] in value) value[arguments[0]] else arguments.getOrNull(1)
            else -> call(name, value, arguments)
        }
        else -> call(name, value, arguments)
    }

    private fun textMethod(value: String, name: String, arguments: List<Any?>, named: Map<String, Any?>): Any? {
        if (named.isNotEmpty()) stop("it calls .$name() with named arguments")
        fun text(place: Int): String = arguments[place] as? String ?: stop("it calls .$name() with ${Values.kind(arguments[place])}")
        val characters = if (arguments.isEmpty() || arguments[0] == null) null else arguments[0] as? String
        return when (name) {
            "strip" -> Values.strip(value, characters)
            "lstrip" -> Values.strip(value, characters, right = false)
            "rstrip" -> Values.strip(value, characters, left = false)
            "startswith" -> prefixes(arguments[0]).any { value.startsWith(it) }
            "endswith" -> prefixes(arguments[0]).any { value.endsWith(it) }
            "upper" -> value.uppercase()
            "lower" -> value.lowercase()
            "capitalize" -> capitalized(value)
            "replace" -> value.replace(text(0), text(1))
            "split" -> {
                val limit = if (arguments.size > 1) Values.long(arguments[1]).toInt() + 1 else 0
                if (characters == "") stop("it splits a text at nothing")
                if (characters != null) value.split(characters, limit = maxOf(limit, 0))
                else if (limit == 0) Values.splitSpaces(value)
                else stop("it calls .split() with a number and without a separator")
            }
            "join" -> Values.items(arguments[0]).joinToString(value) { it as? String ?: stop("it joins ${Values.kind(it)}") }
            "find" -> value.indexOf(text(0)).let { if (it < 0) -1L else value.codePointCount(0, it).toLong() }
            "count" -> value.split(text(0)).size - 1L
            else -> stop("it uses .$name() of a text, which this app does not know")
        }
    }

    private fun prefixes(value: Any?): List<String> =
        (if (value is List<*>) value else listOf(value)).map { it as? String ?: stop("it compares a text's start with ${Values.kind(it)}") }

    private fun capitalized(text: String): String =
        if (text.isEmpty()) text else text.take(1).uppercase() + text.drop(1).lowercase()

    private fun titled(text: String, words: List<String>): String {
        val out = StringBuilder()
        var at = 0
        for (word in words) {
            val start = text.indexOf(word, at)
            out.append(text, at, start).append(capitalized(word))
            at = start + word.length
        }
        return out.append(text, at, text.length).toString()
    }

    companion object {
        private val WORD_STARTS = Regex("[-\\s(\\{\\[<]+")
        val TEXT_METHODS = setOf(
            "strip", "lstrip", "rstrip", "startswith", "endswith", "upper", "lower", "capitalize", "replace", "split", "join",
            "find", "count",
        )
        val MAP_METHODS = setOf("items", "keys", "values", "get")
    }
}
