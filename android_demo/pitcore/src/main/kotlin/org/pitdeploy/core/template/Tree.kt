package org.pitdeploy.core.template

internal sealed class Expression {
    class Literal(val value: Any?) : Expression()

    class Name(val name: String) : Expression()

    class ListOf(val items: List<Expression>) : Expression()

    class MapOf(val entries: List<Pair<Expression, Expression>>) : Expression()

    class Attribute(val of: Expression, val name: String) : Expression()

    class Item(val of: Expression, val key: Expression) : Expression()

    class Slice(val of: Expression, val start: Expression?, val end: Expression?, val step: Expression?) : Expression()

    class Call(val callee: Expression, val arguments: Arguments) : Expression()

    class Filter(val of: Expression, val name: String, val arguments: Arguments) : Expression()

    class Test(val of: Expression, val name: String, val arguments: Arguments, val negated: Boolean) : Expression()

    class Unary(val sign: String, val of: Expression) : Expression()

    class Binary(val sign: String, val left: Expression, val right: Expression) : Expression()

    class Choice(val condition: Expression, val then: Expression, val otherwise: Expression?) : Expression()
}

internal class Arguments(val plain: List<Expression>, val named: Map<String, Expression>)

internal sealed class Node {
    class Text(val text: String) : Node()

    class Output(val value: Expression) : Node()

    class If(val branches: List<Pair<Expression, List<Node>>>, val otherwise: List<Node>) : Node()

    class For(
        val names: List<String>,
        val items: Expression,
        val condition: Expression?,
        val body: List<Node>,
        val otherwise: List<Node>,
    ) : Node()

    class Set(val name: String, val attribute: String?, val value: Expression) : Node()

    class SetBlock(val name: String, val body: List<Node>) : Node()

    class Macro(val name: String, val parameters: List<Pair<String, Expression?>>, val body: List<Node>) : Node()

    /** Tags that mark a part and print nothing themselves. */
    class Plain(val body: List<Node>) : Node()

    object Break : Node()

    object Continue : Node()
}
