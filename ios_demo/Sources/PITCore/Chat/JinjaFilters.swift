extension JinjaInterpreter {
    mutating func filter(_ name: String, _ value: JinjaValue, _ arguments: Arguments) throws -> JinjaValue {
        if case .list(let items) = value { try step(items.count) }
        switch name {
        case "default", "d":
            let isAbsent: Bool
            if case .undefined = value { isAbsent = true } else { isAbsent = arguments.value(1, "boolean")?.isTrue == true && !value.isTrue }
            return isAbsent ? arguments.value(0, "default_value") ?? .string("") : value
        case "length", "count":
            if case .namespace = value { throw stopped("a namespace has no length") }
            return .integer(try items(of: value).count)
        case "list": return .list(try items(of: value))
        case "string": return .string(value.text())
        case "trim":
            let set = arguments.value(0, "chars").flatMap { value -> [Unicode.Scalar]? in
                if case .string(let text) = value { return Array(text.unicodeScalars) } else { return nil }
            }
            return .string(JinjaText.stripped(value.text(), set))
        case "upper", "lower", "capitalize": return try JinjaText.call(name, value.text(), [])
        case "title": return .string(titled(value.text()))
        case "replace":
            guard let old = arguments.value(0, "old"), let new = arguments.value(1, "new") else {
                throw stopped("replace takes two texts")
            }
            let most = arguments.value(2, "count")?.integer ?? -1
            return .string(try JinjaText.replaced(Array(value.text().unicodeScalars), old.text(), new.text(), most: most))
        case "tojson":
            guard let json = value.json else { throw stopped("\(value.kind) cannot be written as JSON") }
            return .string(jsonText(json, indent: arguments.value(0, "indent")?.integer))
        case "int":
            if let number = value.number, number.magnitude < 0x1p62 { return .integer(value.integer ?? Int(number)) }
            let text = JinjaText.stripped(value.text())
            let number = Int(text) ?? Double(text).flatMap { $0.magnitude < 0x1p62 ? Int($0) : nil }
            return number.map(JinjaValue.integer) ?? arguments.value(0, "default") ?? .integer(0)
        case "float":
            let number = value.number ?? Double(JinjaText.stripped(value.text()))
            return number.map(JinjaValue.float) ?? arguments.value(0, "default") ?? .float(0)
        case "abs":
            if let whole = value.integer { return try arithmetic("*", .integer(whole), .integer(whole < 0 ? -1 : 1)) }
            guard let number = value.number else { throw stopped("\(value.kind) is no number") }
            return .float(number.magnitude)
        case "indent": return .string(indented(value.text(), arguments))
        default: return try listFilter(name, value, arguments)
        }
    }

    private mutating func listFilter(_ name: String, _ value: JinjaValue, _ arguments: Arguments) throws -> JinjaValue {
        switch name {
        case "first": return try items(of: value).first ?? .undefined("the first of nothing")
        case "last": return try items(of: value).last ?? .undefined("the last of nothing")
        case "reverse":
            if case .string(let text) = value { return .string(String(text.unicodeScalars.reversed())) }
            return .list(try items(of: value).reversed())
        case "join":
            let attribute = arguments.value(1, "attribute")
            let texts = try items(of: value).map { item in try attribute.map { try path(item, $0) } ?? item }.map { $0.text() }
            return .string(texts.joined(separator: arguments.value(0, "d")?.text() ?? ""))
        case "items":
            if case .undefined = value { return .list([]) }
            guard case .object(let object) = value else { throw stopped("\(value.kind) has no items") }
            return .list(object.pairs.map { .list([$0.key, $0.value]) })
        case "dictsort":
            guard case .object(let object) = value else { throw stopped("\(value.kind) has no items") }
            let pairs = try sorted(object.pairs.map { .list([$0.key, $0.value]) }) { pair in
                if case .list(let both) = pair, let key = both.first { return key } else { return pair }
            }
            return .list(pairs)
        case "map":
            if let attribute = arguments.named["attribute"] {
                let absent = arguments.named["default"]
                return .list(try items(of: value).map { item in
                    let found = try path(item, attribute)
                    if case .undefined = found, let absent { return absent } else { return found }
                })
            }
            guard case .string(let inner)? = arguments.positional.first else { throw stopped("map needs a filter or an attribute") }
            let rest = Arguments(positional: Array(arguments.positional.dropFirst()), named: arguments.named)
            return .list(try items(of: value).map { try filter(inner, $0, rest) })
        case "select", "reject":
            return .list(try items(of: value).filter { item in
                try step()
                return try passes(item, arguments.positional) == (name == "select")
            })
        case "selectattr", "rejectattr":
            guard let attribute = arguments.positional.first else { throw stopped("\(name) needs an attribute") }
            let rest = Array(arguments.positional.dropFirst())
            return .list(try items(of: value).filter { item in
                try step()
                return try passes(try path(item, attribute), rest) == (name == "selectattr")
            })
        case "unique":
            var seen: [JinjaValue] = []
            for item in try items(of: value) where !seen.contains(where: { $0.equals(item) }) {
                try step()
                seen.append(item)
            }
            return .list(seen)
        case "sort":
            let attribute = arguments.named["attribute"]
            let list = try sorted(try items(of: value)) { item in try attribute.map { try path(item, $0) } ?? item }
            return .list(arguments.value(0, "reverse")?.isTrue == true ? list.reversed() : list)
        case "sum": return try items(of: value).reduce(.integer(0)) { try arithmetic("+", $0, $1) }
        case "min", "max":
            let list = try sorted(try items(of: value)) { $0 }
            return (name == "min" ? list.first : list.last) ?? .undefined("the \(name) of nothing")
        default: throw stopped("the filter '\(name)' is not known")
        }
    }

    private func passes(_ value: JinjaValue, _ arguments: [JinjaValue]) throws -> Bool {
        guard let first = arguments.first else { return value.isTrue }
        guard case .string(let name) = first else { throw stopped("a test was expected") }
        return try test(name, value, Array(arguments.dropFirst()))
    }

    /// The field of an item; a path like `a.b` goes deeper.
    private func path(_ item: JinjaValue, _ path: JinjaValue) throws -> JinjaValue {
        guard case .string(let text) = path else { throw stopped("an attribute was expected") }
        return try text.split(separator: ".").reduce(item) { try attribute($0, String($1)) }
    }

    /// Stable, texts without regard to case, as Jinja sorts.
    private func sorted(_ items: [JinjaValue], by key: (JinjaValue) throws -> JinjaValue) throws -> [JinjaValue] {
        let keyed = try items.enumerated().map { place, item in
            let key = try key(item)
            if case .string(let text) = key { return (place: place, key: JinjaValue.string(text.lowercased()), item: item) }
            return (place: place, key: key, item: item)
        }
        return try keyed.sorted { a, b in
            let order = try order(a.key, b.key)
            return order == 0 ? a.place < b.place : order < 0
        }.map(\.item)
    }

    /// A capital behind white space, hyphens and opening brackets, as Jinja's filter has it.
    private func titled(_ text: String) -> String {
        var result = ""
        var startsWord = true
        for scalar in text.unicodeScalars {
            let isBorder = JinjaText.isSpace(scalar) || "-({[<".unicodeScalars.contains(scalar)
            result += startsWord && !isBorder ? scalar.properties.uppercaseMapping : scalar.properties.lowercaseMapping
            startsWord = isBorder
        }
        return result
    }

    private func indented(_ text: String, _ arguments: Arguments) -> String {
        var prefix = String(repeating: " ", count: max(0, min(200, arguments.value(0, "width")?.integer ?? 4)))
        if case .string(let given)? = arguments.value(0, "width") { prefix = given }
        let first = arguments.value(1, "first")?.isTrue == true
        let blank = arguments.value(2, "blank")?.isTrue == true
        let lines = text.split(separator: "\n", omittingEmptySubsequences: false)
        return lines.enumerated().map { place, line in
            place == 0 ? (first ? prefix : "") + line : line.isEmpty && !blank ? "" : prefix + line
        }.joined(separator: "\n")
    }
}
