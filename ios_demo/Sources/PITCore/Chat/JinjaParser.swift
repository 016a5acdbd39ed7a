/// Reads the expressions of a tag.
struct JinjaExpressionParser {
    private let tokens: [JinjaToken]
    private var at = 0
    private var depth = 0
    private static let deepest = 30

    init(_ tokens: [JinjaToken]) { self.tokens = tokens }

    var next: JinjaToken? { at < tokens.count ? tokens[at] : nil }
    var isAtEnd: Bool { at >= tokens.count }

    func fault(_ reason: String) -> PITError { .template("The chat template has a syntax error: \(reason).") }

    mutating func take(_ symbol: String) -> Bool { take(.symbol(symbol)) }
    mutating func takeName(_ name: String) -> Bool { take(.name(name)) }

    private mutating func take(_ token: JinjaToken) -> Bool {
        guard next == token else { return false }
        at += 1
        return true
    }

    mutating func expect(_ symbol: String) throws {
        if !take(symbol) { throw fault("'\(symbol)' was expected") }
    }

    mutating func name() throws -> String {
        guard case .name(let name) = next else { throw fault("a name was expected") }
        at += 1
        return name
    }

    mutating func end() throws {
        if !isAtEnd { throw fault("a tag goes on where it should end") }
    }

    /// An expression, or several with commas between, which are a list.
    mutating func tuple(conditional: Bool = true) throws -> JinjaExpression {
        let first = conditional ? try expression() : try or()
        guard next == .symbol(",") else { return first }
        var items = [first]
        while take(","), !isAtEnd, next != .symbol(")") { items.append(conditional ? try expression() : try or()) }
        return .list(items)
    }

    mutating func expression() throws -> JinjaExpression {
        depth += 1
        defer { depth -= 1 }
        if depth > Self.deepest { throw fault("an expression is nested too deeply") }
        var result = try or()
        while takeName("if") {
            let condition = try or()
            result = .condition(condition, result, takeName("else") ? try expression() : nil)
        }
        return result
    }

    mutating func or() throws -> JinjaExpression {
        var left = try and()
        while takeName("or") { left = .or(left, try and()) }
        return left
    }

    private mutating func and() throws -> JinjaExpression {
        var left = try not()
        while takeName("and") { left = .and(left, try not()) }
        return left
    }

    private mutating func not() throws -> JinjaExpression {
        depth += 1
        defer { depth -= 1 }
        if depth > Self.deepest { throw fault("an expression is nested too deeply") }
        return takeName("not") ? .not(try not()) : try comparison()
    }

    private mutating func comparison() throws -> JinjaExpression {
        let left = try sum()
        var others: [(String, JinjaExpression)] = []
        while let sign = comparisonSign() { others.append((sign, try sum())) }
        return others.isEmpty ? left : .comparison(left, others)
    }

    private mutating func comparisonSign() -> String? {
        for sign in ["==", "!=", "<=", ">=", "<", ">"] where take(sign) { return sign }
        if takeName("in") { return "in" }
        if next == .name("not"), at + 1 < tokens.count, tokens[at + 1] == .name("in") {
            at += 2
            return "not in"
        }
        return nil
    }

    private mutating func sum() throws -> JinjaExpression {
        try chain(["+", "-"]) { parser in try parser.chain(["~"]) { parser in try parser.product() } }
    }

    private mutating func product() throws -> JinjaExpression {
        try chain(["*", "//", "/", "%"]) { parser in try parser.chain(["**"]) { parser in try parser.unary() } }
    }

    private mutating func chain(
        _ signs: [String], _ operand: (inout JinjaExpressionParser) throws -> JinjaExpression
    ) throws -> JinjaExpression {
        var left = try operand(&self)
        while let sign = signs.first(where: { next == .symbol($0) }) {
            at += 1
            left = .arithmetic(sign, left, try operand(&self))
        }
        return left
    }

    private mutating func unary(filtered: Bool = true) throws -> JinjaExpression {
        depth += 1
        defer { depth -= 1 }
        if depth > Self.deepest { throw fault("an expression is nested too deeply") }
        var result: JinjaExpression
        if take("-") {
            result = .negative(try unary(filtered: false))
        } else if take("+") {
            result = try unary(filtered: false)
        } else {
            result = try postfix(try primary())
        }
        guard filtered else { return result }
        while true {
            if take("|") {
                let name = try name()
                result = .filter(result, name, take("(") ? try arguments() : JinjaArguments())
            } else if takeName("is") {
                let isNegated = takeName("not")
                let name = try name()
                let test = JinjaExpression.test(result, name, try testArguments())
                result = isNegated ? .not(test) : test
            } else if take("(") {
                result = .call(result, try arguments())
            } else {
                return result
            }
        }
    }

    private mutating func testArguments() throws -> JinjaArguments {
        if take("(") { return try arguments() }
        switch next {
        case .name(let word) where ["else", "or", "and", "is", "if", "not", "in"].contains(word): return JinjaArguments()
        case .name, .string, .integer, .float, .symbol("["), .symbol("{"):
            return JinjaArguments(positional: [try postfix(try primary())])
        default: return JinjaArguments()
        }
    }

    private mutating func primary() throws -> JinjaExpression {
        guard let token = next else { throw fault("an expression was expected") }
        at += 1
        switch token {
        case .integer(let value): return .value(.integer(value))
        case .float(let value): return .value(.float(value))
        case .string(var text):
            while case .string(let more) = next {
                text += more
                at += 1
            }
            return .value(.string(text))
        case .name("true"), .name("True"): return .value(.bool(true))
        case .name("false"), .name("False"): return .value(.bool(false))
        case .name("none"), .name("None"): return .value(.none)
        case .name(let name):
            if ["and", "or", "not", "if", "else", "in", "is"].contains(name) {
                throw fault("'\(name)' stands where an expression was expected")
            }
            return .name(name)
        case .symbol("("):
            if take(")") { return .list([]) }
            let inner = try tuple()
            try expect(")")
            return inner
        case .symbol("["):
            var items: [JinjaExpression] = []
            while !take("]") {
                items.append(try expression())
                if !take(",") {
                    try expect("]")
                    break
                }
            }
            return .list(items)
        case .symbol("{"): return .dictionary(try pairs())
        case .symbol(let symbol): throw fault("'\(symbol)' stands where an expression was expected")
        }
    }

    private mutating func pairs() throws -> [(JinjaExpression, JinjaExpression)] {
        var pairs: [(JinjaExpression, JinjaExpression)] = []
        while !take("}") {
            let key = try expression()
            try expect(":")
            pairs.append((key, try expression()))
            if !take(",") {
                try expect("}")
                break
            }
        }
        return pairs
    }

    private mutating func postfix(_ start: JinjaExpression) throws -> JinjaExpression {
        var result = start
        while true {
            if take(".") {
                if case .integer(let place) = next {
                    at += 1
                    result = .item(result, .value(.integer(place)))
                } else {
                    result = .attribute(result, try name())
                }
            } else if take("[") {
                result = try subscripted(result)
            } else if take("(") {
                result = .call(result, try arguments())
            } else {
                return result
            }
        }
    }

    private mutating func subscripted(_ base: JinjaExpression) throws -> JinjaExpression {
        var bounds: [JinjaExpression?] = []
        var isSlice = false
        while true {
            bounds.append(next == .symbol(":") || next == .symbol("]") ? nil : try expression())
            if take("]") { break }
            try expect(":")
            isSlice = true
        }
        if isSlice, bounds.count <= 3 {
            return .slice(base, bounds[0], bounds[1], bounds.count == 3 ? bounds[2] : nil)
        }
        guard bounds.count == 1, let item = bounds[0] else { throw fault("an index was expected") }
        return .item(base, item)
    }

    private mutating func arguments() throws -> JinjaArguments {
        var found = JinjaArguments()
        while !take(")") {
            if case .name(let name) = next, at + 1 < tokens.count, tokens[at + 1] == .symbol("=") {
                at += 2
                found.named.append((name, try expression()))
            } else if found.named.isEmpty {
                found.positional.append(try expression())
            } else {
                throw fault("an argument without a name stands behind one with a name")
            }
            if !take(",") {
                try expect(")")
                break
            }
        }
        return found
    }
}

/// Reads the statements of a template.
struct JinjaParser {
    private let parts: [JinjaLexer.Part]
    private var at = 0
    private var depth = 0

    static func parse(_ template: String) throws -> [JinjaNode] {
        var parser = JinjaParser(parts: try JinjaLexer.parts(of: template))
        let (nodes, end) = try parser.nodes(until: [])
        if let end { throw fault("'\(end.word)' ends nothing") }
        return nodes
    }

    private init(parts: [JinjaLexer.Part]) { self.parts = parts }

    private static func fault(_ reason: String) -> PITError { .template("The chat template has a syntax error: \(reason).") }

    /// The word of a tag that ended a list of nodes, and what follows the word.
    private typealias End = (word: String, rest: JinjaExpressionParser)

    private mutating func nodes(until ends: [String]) throws -> ([JinjaNode], End?) {
        depth += 1
        defer { depth -= 1 }
        if depth > 30 { throw Self.fault("tags are nested too deeply") }
        var found: [JinjaNode] = []
        while at < parts.count {
            let part = parts[at]
            at += 1
            switch part {
            case .text(let text): found.append(.text(text))
            case .output(let tokens):
                var parser = JinjaExpressionParser(tokens)
                found.append(.output(try parser.tuple()))
                try parser.end()
            case .statement(let tokens):
                var parser = JinjaExpressionParser(tokens)
                let word = try parser.name()
                if ends.contains(word) || word.hasPrefix("end") || word == "else" || word == "elif" { return (found, (word, parser)) }
                if let node = try statement(word, &parser) { found += node }
            }
        }
        return (found, nil)
    }

    /// The nodes up to one of `ends`, which must come.
    private mutating func body(_ word: String, until ends: [String]) throws -> ([JinjaNode], End) {
        let (nodes, end) = try nodes(until: ends)
        guard let end else { throw Self.fault("'\(word)' does not end; it needs '\(ends.last ?? "")'") }
        guard ends.contains(end.word) else { throw Self.fault("'\(end.word)' stands where '\(ends.last ?? "")' was expected") }
        return (nodes, end)
    }

    private mutating func statement(_ word: String, _ parser: inout JinjaExpressionParser) throws -> [JinjaNode]? {
        switch word {
        case "if": return [try condition(&parser)]
        case "for": return [try loop(&parser)]
        case "set": return [try set(&parser)]
        case "macro": return [try macro(&parser)]
        case "break", "continue":
            try parser.end()
            return [word == "break" ? .breakLoop : .continueLoop]
        case "generation":  // marks the assistant's words for training; it prints nothing itself
            let (nodes, _) = try body(word, until: ["endgeneration"])
            return nodes
        default: throw Self.fault("the tag '\(word)' is not known")
        }
    }

    private mutating func condition(_ parser: inout JinjaExpressionParser) throws -> JinjaNode {
        var branches: [(JinjaExpression, [JinjaNode])] = []
        var test = try parser.tuple()
        try parser.end()
        while true {
            let (nodes, end) = try body("if", until: ["elif", "else", "endif"])
            branches.append((test, nodes))
            var rest = end.rest
            switch end.word {
            case "elif":
                test = try rest.tuple()
                try rest.end()
            case "else":
                try rest.end()
                return .condition(branches, try body("else", until: ["endif"]).0)
            default: return .condition(branches, [])
            }
        }
    }

    private mutating func loop(_ parser: inout JinjaExpressionParser) throws -> JinjaNode {
        let targets = try names(&parser)
        guard parser.takeName("in") else { throw Self.fault("'in' was expected in a loop") }
        let sequence = try parser.tuple(conditional: false)
        let filter = parser.takeName("if") ? try parser.expression() : nil
        try parser.end()
        let (nodes, end) = try body("for", until: ["else", "endfor"])
        let otherwise = end.word == "else" ? try body("else", until: ["endfor"]).0 : []
        return .loop(JinjaLoop(targets: targets, sequence: sequence, filter: filter, body: nodes, otherwise: otherwise))
    }

    private func names(_ parser: inout JinjaExpressionParser) throws -> [String] {
        let isBracketed = parser.take("(")
        var names = [try parser.name()]
        while parser.take(",") { names.append(try parser.name()) }
        if isBracketed { try parser.expect(")") }
        return names
    }

    private mutating func set(_ parser: inout JinjaExpressionParser) throws -> JinjaNode {
        let names = try names(&parser)
        var target = JinjaTarget.names(names)
        if names.count == 1, parser.take(".") { target = .field(names[0], try parser.name()) }
        if parser.take("=") {
            let value = try parser.tuple()
            try parser.end()
            return .set(target, value)
        }
        try parser.end()
        return .setBlock(target, try body("set", until: ["endset"]).0)
    }

    private mutating func macro(_ parser: inout JinjaExpressionParser) throws -> JinjaNode {
        let name = try parser.name()
        try parser.expect("(")
        var parameters: [(name: String, absent: JinjaExpression?)] = []
        while !parser.take(")") {
            let parameter = try parser.name()
            parameters.append((parameter, parser.take("=") ? try parser.expression() : nil))
            if !parser.take(",") {
                try parser.expect(")")
                break
            }
        }
        try parser.end()
        return .macro(JinjaMacro(name: name, parameters: parameters, body: try body("macro", until: ["endmacro"]).0))
    }
}
