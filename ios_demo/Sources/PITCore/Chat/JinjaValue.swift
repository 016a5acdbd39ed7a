/// A value while a template runs. Lists and objects are plain data: a template cannot change what it was given.
indirect enum JinjaValue: Sendable {
    case undefined(String)
    case none
    case bool(Bool)
    case integer(Int)
    case float(Double)
    case string(String)
    case list([JinjaValue])
    case object(JinjaObject)
    /// A namespace, by its number in the interpreter.
    case namespace(Int)
    /// The `loop` of a loop, by its number in the interpreter.
    case loop(Int)
    case macro(Int)
    case function(String)
    /// A method of a string or object, taken but not called yet.
    case method(JinjaValue, String)

    init(_ json: JSONValue) {
        switch json {
        case .null: self = .none
        case .bool(let flag): self = .bool(flag)
        case .integer(let number): self = .integer(number)
        case .number(let number): self = .float(number)
        case .string(let text): self = .string(text)
        case .array(let items): self = .list(items.map(JinjaValue.init))
        case .object(let object):
            self = .object(JinjaObject(zip(object.keys, object.values).map { (.string($0), JinjaValue($1)) }))
        }
    }

    /// The value as JSON; nil for what JSON does not have.
    var json: JSONValue? {
        switch self {
        case .none: return .null
        case .bool(let flag): return .bool(flag)
        case .integer(let number): return .integer(number)
        case .float(let number): return .number(number)
        case .string(let text): return .string(text)
        case .list(let items):
            let found = items.compactMap(\.json)
            return found.count == items.count ? .array(found) : nil
        case .object(let object):
            var fields = JSONObject()
            for (key, value) in object.pairs {
                guard case .string(let name) = key, let json = value.json else { return nil }
                fields.set(name, json)
            }
            return .object(fields)
        default: return nil
        }
    }

    var isTrue: Bool {
        switch self {
        case .undefined, .none: return false
        case .bool(let flag): return flag
        case .integer(let number): return number != 0
        case .float(let number): return number != 0
        case .string(let text): return !text.isEmpty
        case .list(let items): return !items.isEmpty
        case .object(let object): return !object.pairs.isEmpty
        case .namespace, .loop, .macro, .function, .method: return true
        }
    }

    /// A number, where it is one; true and false are 1 and 0, as in Python.
    var number: Double? {
        switch self {
        case .bool(let flag): return flag ? 1 : 0
        case .integer(let value): return Double(value)
        case .float(let value): return value
        default: return nil
        }
    }

    var integer: Int? {
        switch self {
        case .bool(let flag): return flag ? 1 : 0
        case .integer(let value): return value
        default: return nil
        }
    }

    /// What Python calls the kind, for messages.
    var kind: String {
        switch self {
        case .undefined(let name): return "'\(name)', which is not defined"
        case .none: return "none"
        case .bool: return "true or false"
        case .integer, .float: return "a number"
        case .string: return "a text"
        case .list: return "a list"
        case .object, .namespace, .loop: return "an object"
        case .macro, .function, .method: return "a function"
        }
    }

    /// Text as Python prints it; inside lists texts stand in quotes.
    func text(quoted: Bool = false) -> String {
        switch self {
        case .undefined: return ""
        case .none: return "None"
        case .bool(let flag): return flag ? "True" : "False"
        case .integer(let number): return String(number)
        case .float(let number): return number.isFinite ? "\(number)" : number.isNaN ? "nan" : number > 0 ? "inf" : "-inf"
        case .string(let text): return quoted ? pythonQuoted(text) : text
        case .list(let items): return "[" + items.map { $0.text(quoted: true) }.joined(separator: ", ") + "]"
        case .object(let object):
            let fields = object.pairs.map { $0.key.text(quoted: true) + ": " + $0.value.text(quoted: true) }
            return "{" + fields.joined(separator: ", ") + "}"
        case .namespace, .loop: return "<namespace>"
        case .macro, .function, .method: return "<function>"
        }
    }

    /// Python's `==`.
    func equals(_ other: JinjaValue) -> Bool {
        if let a = integer, let b = other.integer { return a == b }
        if let a = number, let b = other.number { return a == b }
        switch (self, other) {
        case (.undefined, .undefined), (.none, .none): return true
        case (.string(let a), .string(let b)): return a.isExactly(b)
        case (.list(let a), .list(let b)): return a.count == b.count && zip(a, b).allSatisfy { $0.equals($1) }
        case (.object(let a), .object(let b)):
            return a.pairs.count == b.pairs.count && a.pairs.allSatisfy { b[$0.key]?.equals($0.value) ?? false }
        case (.namespace(let a), .namespace(let b)): return a == b
        default: return false
        }
    }
}

/// A dictionary in the order of its making.
struct JinjaObject: Sendable {
    private(set) var pairs: [(key: JinjaValue, value: JinjaValue)] = []

    init(_ pairs: [(JinjaValue, JinjaValue)] = []) {
        for (key, value) in pairs { self[key] = value }
    }

    subscript(key: JinjaValue) -> JinjaValue? {
        get { pairs.first { $0.key.equals(key) }?.value }
        set {
            let place = pairs.firstIndex { $0.key.equals(key) }
            switch (place, newValue) {
            case (let place?, let value?): pairs[place].value = value
            case (nil, let value?): pairs.append((key, value))
            case (let place?, nil): pairs.remove(at: place)
            case (nil, nil): break
            }
        }
    }
}

/// A text in Python's quotes: single ones, unless it has some and no double ones.
private func pythonQuoted(_ text: String) -> String {
    let scalars = text.unicodeScalars
    let quote: Unicode.Scalar = scalars.contains("'") && !scalars.contains("\"") ? "\"" : "'"
    var result = String(quote)
    for scalar in scalars {
        switch scalar {
        case "\\": result += "\\\\"
        case "\n": result += "\\n"
        case "\r": result += "\\r"
        case "\t": result += "\\t"
        case quote: result += "\\" + String(quote)
        default:
            if scalar.value < 32 || scalar.value == 127 {
                let digits = String(scalar.value, radix: 16)
                result += "\\x" + (digits.count < 2 ? "0" : "") + digits
            } else {
                result.unicodeScalars.append(scalar)
            }
        }
    }
    return result + String(quote)
}
