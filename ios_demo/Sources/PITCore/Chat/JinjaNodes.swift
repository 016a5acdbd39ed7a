/// An expression of a template.
indirect enum JinjaExpression: Sendable {
    case value(JinjaValue)
    case name(String)
    case list([JinjaExpression])
    case dictionary([(JinjaExpression, JinjaExpression)])
    case attribute(JinjaExpression, String)
    case item(JinjaExpression, JinjaExpression)
    case slice(JinjaExpression, JinjaExpression?, JinjaExpression?, JinjaExpression?)
    case call(JinjaExpression, JinjaArguments)
    case filter(JinjaExpression, String, JinjaArguments)
    case test(JinjaExpression, String, JinjaArguments)
    case not(JinjaExpression)
    case negative(JinjaExpression)
    case and(JinjaExpression, JinjaExpression)
    case or(JinjaExpression, JinjaExpression)
    case arithmetic(String, JinjaExpression, JinjaExpression)
    case comparison(JinjaExpression, [(String, JinjaExpression)])
    case condition(JinjaExpression, JinjaExpression, JinjaExpression?)
}

struct JinjaArguments: Sendable {
    var positional: [JinjaExpression] = []
    var named: [(String, JinjaExpression)] = []
}

/// A statement of a template, or a part of its text.
indirect enum JinjaNode: Sendable {
    case text(String)
    case output(JinjaExpression)
    case condition([(JinjaExpression, [JinjaNode])], [JinjaNode])
    case loop(JinjaLoop)
    case set(JinjaTarget, JinjaExpression)
    case setBlock(JinjaTarget, [JinjaNode])
    case macro(JinjaMacro)
    case breakLoop
    case continueLoop
}

struct JinjaLoop: Sendable {
    let targets: [String]
    let sequence: JinjaExpression
    let filter: JinjaExpression?
    let body: [JinjaNode]
    let otherwise: [JinjaNode]
}

struct JinjaMacro: Sendable {
    let name: String
    let parameters: [(name: String, absent: JinjaExpression?)]
    let body: [JinjaNode]
}

/// What `set` writes: names, or a field of a namespace.
enum JinjaTarget: Sendable {
    case names([String])
    case field(String, String)
}
