/// Python's methods of texts, on code points.
enum JinjaText {
    static let methods: Set<String> = [
        "strip", "lstrip", "rstrip", "split", "splitlines", "startswith", "endswith", "upper", "lower", "capitalize",
        "title", "replace", "join", "find", "count", "removeprefix", "removesuffix", "isdigit", "isspace",
    ]

    static func call(_ name: String, _ text: String, _ arguments: [JinjaValue]) throws -> JinjaValue {
        let scalars = Array(text.unicodeScalars)
        switch name {
        case "strip", "lstrip", "rstrip":
            let set = try optionalText(name, arguments, 0).map { Array($0.unicodeScalars) }
            return .string(stripped(text, set, left: name != "rstrip", right: name != "lstrip"))
        case "split": return try split(scalars, arguments)
        case "splitlines": return .list(lines(scalars).map(JinjaValue.string))
        case "startswith", "endswith":
            let ends = try alternatives(name, arguments)
            return .bool(ends.contains { end in
                name == "startswith"
                    ? text.utf8.starts(with: end.utf8) : text.utf8.reversed().starts(with: end.utf8.reversed())
            })
        case "upper": return .string(scalars.map(\.properties.uppercaseMapping).joined())
        case "lower": return .string(text.lowercased())
        case "capitalize": return .string(capitalized(scalars[...]))
        case "title": return .string(titled(scalars))
        case "replace":
            let (old, new) = (try needed(name, arguments, 0), try needed(name, arguments, 1))
            let most = arguments.count > 2 ? arguments[2].integer ?? -1 : -1
            return .string(try replaced(scalars, old, new, most: most))
        case "join":
            guard case .list(let items)? = arguments.first else { throw wrong(name, "a list") }
            let texts = try items.map { item -> String in
                guard case .string(let text) = item else { throw wrong(name, "a list of texts") }
                return text
            }
            return .string(texts.joined(separator: text))
        case "find": return .integer(find(scalars, Array(try needed(name, arguments, 0).unicodeScalars), 0) ?? -1)
        case "count": return .integer(occurrences(scalars, Array(try needed(name, arguments, 0).unicodeScalars)).count)
        case "removeprefix":
            let prefix = try needed(name, arguments, 0).unicodeScalars
            return .string(String(scalars.starts(with: prefix) ? scalars.dropFirst(prefix.count) : scalars[...]))
        case "removesuffix":
            let suffix = try needed(name, arguments, 0).unicodeScalars
            let ends = !suffix.isEmpty && scalars.reversed().starts(with: suffix.reversed())
            return .string(String(ends ? scalars.dropLast(suffix.count) : scalars[...]))
        case "isdigit":
            return .bool(!scalars.isEmpty && scalars.allSatisfy { $0.properties.numericType == .decimal || $0.properties.numericType == .digit })
        case "isspace": return .bool(!scalars.isEmpty && scalars.allSatisfy(isSpace))
        default: throw PITError.template("The chat template stopped with: texts have no method '\(name)'.")
        }
    }

    /// Python's white space: Unicode's, and the four separators of ASCII.
    static func isSpace(_ scalar: Unicode.Scalar) -> Bool {
        scalar.properties.isWhitespace || (0x1C...0x1F).contains(scalar.value)
    }

    static func stripped(_ text: String, _ set: [Unicode.Scalar]? = nil, left: Bool = true, right: Bool = true) -> String {
        let isGone = { (scalar: Unicode.Scalar) in set?.contains(scalar) ?? isSpace(scalar) }
        var scalars = Array(text.unicodeScalars)[...]
        if left { scalars = scalars.drop(while: isGone) }
        if right { while let last = scalars.last, isGone(last) { scalars.removeLast() } }
        return String(scalars)
    }

    static func capitalized(_ scalars: ArraySlice<Unicode.Scalar>) -> String {
        guard let first = scalars.first else { return "" }
        return first.properties.titlecaseMapping + String(scalars.dropFirst()).lowercased()
    }

    /// Each run of letters with a capital in front, as `str.title` has it.
    static func titled(_ scalars: [Unicode.Scalar]) -> String {
        var result = ""
        var isInWord = false
        for scalar in scalars {
            let isCased = scalar.properties.isCased
            result += isCased && !isInWord ? scalar.properties.titlecaseMapping : scalar.properties.lowercaseMapping
            isInWord = isCased
        }
        return result
    }

    static func replaced(_ scalars: [Unicode.Scalar], _ old: String, _ new: String, most: Int = -1) throws -> String {
        let pattern = Array(old.unicodeScalars)
        if (scalars.count + 1) * max(1, new.utf8.count / max(1, pattern.count)) > JinjaInterpreter.longest {
            throw PITError.template("The chat template stopped with: a replacement makes a text too long.")
        }
        if pattern.isEmpty {
            let count = most < 0 ? scalars.count + 1 : most
            let parts = scalars.enumerated().map { ($0 < count ? new : "") + String($1) }
            return parts.joined() + (scalars.count < count ? new : "")
        }
        var result = ""
        var end = 0
        for (number, start) in occurrences(scalars, pattern).enumerated() where most < 0 || number < most {
            result += String(scalars[end..<start]) + new
            end = start + pattern.count
        }
        return result + String(scalars[end...])
    }

    private static func occurrences(_ scalars: [Unicode.Scalar], _ pattern: [Unicode.Scalar]) -> [Int] {
        guard !pattern.isEmpty else { return Array(0...scalars.count) }
        var found: [Int] = []
        var from = 0
        while let place = find(scalars, pattern, from) {
            found.append(place)
            from = place + pattern.count
        }
        return found
    }

    static func find(_ scalars: [Unicode.Scalar], _ pattern: [Unicode.Scalar], _ from: Int) -> Int? {
        guard scalars.count - from >= pattern.count else { return nil }
        return (from...scalars.count - pattern.count).first { scalars[$0...].starts(with: pattern) }
    }

    private static func split(_ scalars: [Unicode.Scalar], _ arguments: [JinjaValue]) throws -> JinjaValue {
        let most = arguments.count > 1 ? arguments[1].integer ?? -1 : -1
        guard let separator = try optionalText("split", arguments, 0) else {
            var words: [JinjaValue] = []
            var rest = scalars[...].drop(while: isSpace)
            while !rest.isEmpty {
                if most >= 0, words.count == most {
                    words.append(.string(stripped(String(rest), left: false)))
                    break
                }
                let word = rest.prefix { !isSpace($0) }
                words.append(.string(String(word)))
                rest = rest.dropFirst(word.count).drop(while: isSpace)
            }
            return .list(words)
        }
        let pattern = Array(separator.unicodeScalars)
        if pattern.isEmpty { throw PITError.template("The chat template stopped with: split has an empty separator.") }
        var parts: [JinjaValue] = []
        var end = 0
        for start in occurrences(scalars, pattern) where most < 0 || parts.count < most {
            parts.append(.string(String(scalars[end..<start])))
            end = start + pattern.count
        }
        return .list(parts + [.string(String(scalars[end...]))])
    }

    private static let lineBreaks: Set<UInt32> = [0x0A, 0x0B, 0x0C, 0x0D, 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029]

    private static func lines(_ scalars: [Unicode.Scalar]) -> [String] {
        var lines: [String] = []
        var start = 0
        var at = 0
        while at < scalars.count {
            if lineBreaks.contains(scalars[at].value) {
                lines.append(String(scalars[start..<at]))
                if scalars[at] == "\r", at + 1 < scalars.count, scalars[at + 1] == "\n" { at += 1 }
                start = at + 1
            }
            at += 1
        }
        return start < scalars.count ? lines + [String(scalars[start...])] : lines
    }

    private static func needed(_ name: String, _ arguments: [JinjaValue], _ place: Int) throws -> String {
        guard arguments.count > place, case .string(let text) = arguments[place] else { throw wrong(name, "a text") }
        return text
    }

    private static func optionalText(_ name: String, _ arguments: [JinjaValue], _ place: Int) throws -> String? {
        guard arguments.count > place else { return nil }
        if case .none = arguments[place] { return nil }
        return try needed(name, arguments, place)
    }

    private static func alternatives(_ name: String, _ arguments: [JinjaValue]) throws -> [String] {
        guard case .list(let items)? = arguments.first else { return [try needed(name, arguments, 0)] }
        return try items.map { try needed(name, [$0], 0) }
    }

    private static func wrong(_ name: String, _ expected: String) -> PITError {
        .template("The chat template stopped with: '\(name)' takes \(expected).")
    }
}
