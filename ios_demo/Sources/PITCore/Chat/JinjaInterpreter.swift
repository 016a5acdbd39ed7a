import Foundation

/// Runs a template over plain data. It can reach nothing else: no files, no types, no underscore names. Its steps, its
/// output and the depth of its macros are limited, so that a foreign template ends.
struct JinjaInterpreter {
    static let mostSteps = 500_000
    /// Bytes of a text.
    static let longest = 16 << 20
    private static let mostItems = 1 << 20
    private static let deepestMacro = 10
    /// Expressions inside one another. Swift's tasks have small stacks.
    private static let deepest = 100

    private var scopes: [[String: JinjaValue]]
    private var namespaces: [[String: JinjaValue]] = []
    private var loops: [LoopState] = []
    private var macros: [JinjaMacro] = []
    private var output = ""
    private var steps = 0
    private var macroDepth = 0
    private var depth = 0
    let now: Date

    private enum Flow { case normal, breaks, continues }

    /// Where a loop is.
    private struct LoopState {
        let items: [JinjaValue]
        var index = 0

        func field(_ name: String) -> JinjaValue? {
            switch name {
            case "index": return .integer(index + 1)
            case "index0": return .integer(index)
            case "revindex": return .integer(items.count - index)
            case "revindex0": return .integer(items.count - index - 1)
            case "first": return .bool(index == 0)
            case "last": return .bool(index == items.count - 1)
            case "length": return .integer(items.count)
            case "previtem": return index > 0 ? items[index - 1] : .undefined("loop.previtem")
            case "nextitem": return index + 1 < items.count ? items[index + 1] : .undefined("loop.nextitem")
            default: return nil
            }
        }
    }

    static func render(_ nodes: [JinjaNode], _ variables: [String: JinjaValue], now: Date) throws -> String {
        var interpreter = JinjaInterpreter(variables, now)
        _ = try interpreter.run(nodes)
        return interpreter.output
    }

    private init(_ variables: [String: JinjaValue], _ now: Date) {
        let functions = ["range", "namespace", "dict", "raise_exception", "strftime_now"]
        scopes = [Dictionary(uniqueKeysWithValues: functions.map { ($0, JinjaValue.function($0)) }), variables]
        self.now = now
    }

    static func stopped(_ reason: String) -> PITError { .template("The chat template stopped with: \(reason).") }

    func stopped(_ reason: String) -> PITError { Self.stopped(reason) }

    /// Count work that is done, so that a template ends.
    mutating func step(_ count: Int = 1) throws {
        steps += count
        if steps > Self.mostSteps { throw stopped("it takes more than \(Self.mostSteps) steps") }
    }

    private func lookUp(_ name: String) -> JinjaValue {
        scopes.last { $0[name] != nil }?[name] ?? .undefined(name)
    }

    // MARK: - Statements

    private mutating func run(_ nodes: [JinjaNode]) throws -> Flow {
        for node in nodes {
            try step()
            switch node {
            case .text(let text): try print(text)
            case .output(let expression): try print(try evaluate(expression).text())
            case .condition(let branches, let otherwise):
                let branch = try branches.first { try evaluate($0.0).isTrue }?.1 ?? otherwise
                let flow = try run(branch)
                if flow != .normal { return flow }
            case .loop(let loop): try runLoop(loop)
            case .set(let target, let expression): try assign(target, try evaluate(expression))
            case .setBlock(let target, let body): try assign(target, .string(try captured(body)))
            case .macro(let macro):
                macros.append(macro)
                scopes[scopes.count - 1][macro.name] = .macro(macros.count - 1)
            case .breakLoop: return .breaks
            case .continueLoop: return .continues
            }
        }
        return .normal
    }

    private mutating func print(_ text: String) throws {
        output += text
        if output.utf8.count > Self.longest { throw stopped("its text is longer than \(Self.longest) bytes") }
    }

    /// What the nodes print, in a scope of their own.
    private mutating func captured(_ nodes: [JinjaNode], _ variables: [String: JinjaValue] = [:]) throws -> String {
        let outer = output
        output = ""
        scopes.append(variables)
        defer {
            scopes.removeLast()
            output = outer
        }
        _ = try run(nodes)
        return output
    }

    private mutating func assign(_ target: JinjaTarget, _ value: JinjaValue) throws {
        switch target {
        case .names(let names):
            for (name, item) in try unpacked(value, names) { scopes[scopes.count - 1][name] = item }
        case .field(let name, let field):
            guard case .namespace(let number) = lookUp(name) else {
                throw stopped("'\(name).\(field)' is set, and '\(name)' is no namespace")
            }
            namespaces[number][field] = value
        }
    }

    private func unpacked(_ value: JinjaValue, _ names: [String]) throws -> [(String, JinjaValue)] {
        if names.count == 1 { return [(names[0], value)] }
        guard case .list(let items) = value, items.count == names.count else {
            throw stopped("\(value.kind) cannot be taken apart into \(names.count) names")
        }
        return Array(zip(names, items))
    }

    private func scope(_ item: JinjaValue, _ names: [String]) throws -> [String: JinjaValue] {
        Dictionary(try unpacked(item, names)) { $1 }
    }

    private mutating func runLoop(_ loop: JinjaLoop) throws {
        var items = try self.items(of: try evaluate(loop.sequence))
        try step(items.count)
        if let filter = loop.filter {
            items = try items.filter { item in
                scopes.append(try scope(item, loop.targets))
                defer { scopes.removeLast() }
                return try evaluate(filter).isTrue
            }
        }
        if items.isEmpty {
            _ = try run(loop.otherwise)
            return
        }
        loops.append(LoopState(items: items))
        let number = loops.count - 1
        for (index, item) in items.enumerated() {
            loops[number].index = index
            var scope = try scope(item, loop.targets)
            scope["loop"] = .loop(number)
            scopes.append(scope)
            defer { scopes.removeLast() }
            if try run(loop.body) == .breaks { return }
        }
    }

    /// What a loop goes through: the items of a list, the keys of an object, the characters of a text.
    func items(of value: JinjaValue) throws -> [JinjaValue] {
        switch value {
        case .list(let items): return items
        case .object(let object): return object.pairs.map(\.key)
        case .string(let text): return text.unicodeScalars.map { .string(String($0)) }
        case .undefined: return []
        default: throw stopped("\(value.kind) is no list")
        }
    }

    // MARK: - Expressions

    mutating func evaluate(_ expression: JinjaExpression) throws -> JinjaValue {
        try step()
        depth += 1
        defer { depth -= 1 }
        if depth > Self.deepest { throw stopped("expressions stand inside one another more than \(Self.deepest) deep") }
        let value = try valueOf(expression)
        switch value {
        case .string(let text) where text.utf8.count > Self.longest:
            throw stopped("a text is longer than \(Self.longest) bytes")
        case .list(let items) where items.count > Self.mostItems:
            throw stopped("a list has more than \(Self.mostItems) items")
        default: return value
        }
    }

    private mutating func valueOf(_ expression: JinjaExpression) throws -> JinjaValue {
        switch expression {
        case .value(let value): return value
        case .name(let name): return lookUp(name)
        case .list(let items): return .list(try items.map { try evaluate($0) })
        case .dictionary(let pairs): return .object(JinjaObject(try pairs.map { (try evaluate($0.0), try evaluate($0.1)) }))
        case .attribute(let base, let name): return try attribute(try evaluate(base), name)
        case .item(let base, let key): return try item(try evaluate(base), try evaluate(key))
        case .slice(let base, let start, let stop, let stride):
            let bounds = try [start, stop, stride].map { bound -> Int? in
                guard let bound else { return nil }
                let value = try evaluate(bound)
                if case .none = value { return nil }
                guard let number = value.integer else { throw stopped("\(value.kind) is no bound of a slice") }
                return number
            }
            return try slice(try evaluate(base), bounds[0], bounds[1], bounds[2] ?? 1)
        case .call(let callee, let arguments): return try call(try evaluate(callee), try evaluated(arguments))
        case .filter(let value, let name, let arguments):
            return try filter(name, try evaluate(value), try evaluated(arguments))
        case .test(let value, let name, let arguments):
            return .bool(try test(name, try evaluate(value), try evaluated(arguments).positional))
        case .not(let value): return .bool(!(try evaluate(value).isTrue))
        case .negative(let value): return try arithmetic("-", .integer(0), try evaluate(value))
        case .and(let left, let right):
            let value = try evaluate(left)
            return value.isTrue ? try evaluate(right) : value
        case .or(let left, let right):
            let value = try evaluate(left)
            return value.isTrue ? value : try evaluate(right)
        case .arithmetic(let sign, let left, let right): return try arithmetic(sign, try evaluate(left), try evaluate(right))
        case .comparison(let first, let others):
            var left = try evaluate(first)
            for (sign, other) in others {
                let right = try evaluate(other)
                if !(try compare(sign, left, right)) { return .bool(false) }
                left = right
            }
            return .bool(true)
        case .condition(let condition, let value, let otherwise):
            if try evaluate(condition).isTrue { return try evaluate(value) }
            return try otherwise.map { try evaluate($0) } ?? .undefined("an inline if without else")
        }
    }

    struct Arguments {
        var positional: [JinjaValue]
        var named: [String: JinjaValue]

        /// The argument at a place or under a name.
        func value(_ place: Int, _ name: String) -> JinjaValue? { positional.count > place ? positional[place] : named[name] }
    }

    private mutating func evaluated(_ arguments: JinjaArguments) throws -> Arguments {
        var found = Arguments(positional: [], named: [:])
        for argument in arguments.positional { found.positional.append(try evaluate(argument)) }
        for (name, argument) in arguments.named { found.named[name] = try evaluate(argument) }
        return found
    }

    func attribute(_ base: JinjaValue, _ name: String) throws -> JinjaValue {
        switch base {
        case .undefined: throw stopped("\(base.kind) is asked for '\(name)'")
        case .namespace(let number): if let value = namespaces[number][name] { return value }
        case .loop(let number): if let value = loops[number].field(name) { return value }
        case .object(let object):
            if ["items", "keys", "values", "get"].contains(name) { return .method(base, name) }
            if let value = object[.string(name)] { return value }
        case .string: if JinjaText.methods.contains(name) { return .method(base, name) }
        default: break
        }
        if name.hasPrefix("_") { throw stopped("'\(name)' is out of bounds") }
        return .undefined(name)
    }

    private func item(_ base: JinjaValue, _ key: JinjaValue) throws -> JinjaValue {
        switch base {
        case .undefined: throw stopped("\(base.kind) is asked for an item")
        case .list(let items):
            guard let place = key.integer else { break }
            let at = place < 0 ? items.count + place : place
            return items.indices.contains(at) ? items[at] : .undefined("item \(place)")
        case .string(let text):
            guard let place = key.integer else { break }
            let scalars = Array(text.unicodeScalars)
            let at = place < 0 ? scalars.count + place : place
            return scalars.indices.contains(at) ? .string(String(scalars[at])) : .undefined("character \(place)")
        case .object(let object): if let value = object[key] { return value }
        default: break
        }
        if case .string(let name) = key { return try attribute(base, name) }
        return .undefined("item \(key.text())")
    }

    private func slice(_ base: JinjaValue, _ start: Int?, _ stop: Int?, _ stride: Int) throws -> JinjaValue {
        func places(_ count: Int) throws -> [Int] {
            if stride == 0 { throw stopped("a slice has the step 0") }
            func bound(_ value: Int?, _ absent: Int) -> Int {
                guard let value else { return absent }
                let least = stride > 0 ? 0 : -1
                return min(max(value < 0 ? value + count : value, least), stride > 0 ? count : count - 1)
            }
            return Array(
                Swift.stride(
                    from: bound(start, stride > 0 ? 0 : count - 1), to: bound(stop, stride > 0 ? count : -1), by: stride))
        }
        switch base {
        case .list(let items): return .list(try places(items.count).map { items[$0] })
        case .string(let text):
            let scalars = Array(text.unicodeScalars)
            return .string(String(try places(scalars.count).map { scalars[$0] }))
        default: throw stopped("\(base.kind) cannot be sliced")
        }
    }

    private mutating func call(_ callee: JinjaValue, _ arguments: Arguments) throws -> JinjaValue {
        switch callee {
        case .macro(let number): return try callMacro(macros[number], arguments)
        case .function(let name): return try callFunction(name, arguments)
        case .method(.string(let text), let name): return try JinjaText.call(name, text, arguments.positional)
        case .method(.object(let object), let name):
            switch name {
            case "items": return .list(object.pairs.map { .list([$0.key, $0.value]) })
            case "keys": return .list(object.pairs.map(\.key))
            case "values": return .list(object.pairs.map(\.value))
            default: return object[arguments.positional.first ?? .none] ?? arguments.value(1, "default") ?? .none
            }
        default: throw stopped("\(callee.kind) is called")
        }
    }

    private mutating func callMacro(_ macro: JinjaMacro, _ arguments: Arguments) throws -> JinjaValue {
        macroDepth += 1
        defer { macroDepth -= 1 }
        if macroDepth > Self.deepestMacro { throw stopped("macros call each other more than \(Self.deepestMacro) deep") }
        if arguments.positional.count > macro.parameters.count {
            throw stopped("the macro '\(macro.name)' takes \(macro.parameters.count) arguments")
        }
        var variables: [String: JinjaValue] = [:]
        for (place, parameter) in macro.parameters.enumerated() {
            variables[parameter.name] = try arguments.value(place, parameter.name)
                ?? parameter.absent.map { try evaluate($0) } ?? .undefined(parameter.name)
        }
        // A macro sees the template's own variables, and not those of where it is called.
        let outer = scopes
        scopes = Array(scopes.prefix(2))
        defer { scopes = outer }
        return .string(try captured(macro.body, variables))
    }

    private mutating func callFunction(_ name: String, _ arguments: Arguments) throws -> JinjaValue {
        switch name {
        case "raise_exception": throw PITError.template("The chat template stopped with: \(arguments.positional.first?.text() ?? "no reason")")
        case "namespace", "dict":
            var fields = arguments.named
            if case .object(let object)? = arguments.positional.first {
                for (key, value) in object.pairs { fields[key.text()] = fields[key.text()] ?? value }
            }
            if name == "dict" {
                return .object(JinjaObject(fields.sorted { $0.key < $1.key }.map { (.string($0.key), $0.value) }))
            }
            namespaces.append(fields)
            return .namespace(namespaces.count - 1)
        case "range":
            let bounds = arguments.positional.compactMap(\.integer)
            guard (1...3).contains(bounds.count), bounds.count == arguments.positional.count, bounds.count < 3 || bounds[2] != 0
            else { throw stopped("range takes one to three whole numbers") }
            let (start, stop) = bounds.count == 1 ? (0, bounds[0]) : (bounds[0], bounds[1])
            let numbers = Swift.stride(from: start, to: stop, by: bounds.count == 3 ? bounds[2] : 1).prefix(100_001)
            let list = numbers.map(JinjaValue.integer)
            if list.count > 100_000 { throw stopped("a range has more than 100000 numbers") }
            try step(list.count)
            return .list(list)
        default:  // strftime_now
            guard case .string(let format)? = arguments.positional.first else { throw stopped("strftime_now takes a text") }
            return .string(try formatted(now, format))
        }
    }
}
