/// JSON as it stands in a file: integers apart from other numbers, objects in their order.
public enum JSONValue: Sendable, Equatable {
    case null
    case bool(Bool)
    /// A number without fraction and exponent. One beyond 64 bits is kept as the nearest that fits.
    case integer(Int)
    case number(Double)
    case string(String)
    case array([JSONValue])
    case object(JSONObject)

    public var object: JSONObject? { if case .object(let value) = self { return value } else { return nil } }
    public var array: [JSONValue]? { if case .array(let value) = self { return value } else { return nil } }
    public var string: String? { if case .string(let value) = self { return value } else { return nil } }
    public var integer: Int? { if case .integer(let value) = self { return value } else { return nil } }
    public var bool: Bool? { if case .bool(let value) = self { return value } else { return nil } }
    public var isNull: Bool { self == .null }

    /// Any number as a double.
    public var double: Double? {
        switch self {
        case .integer(let value): return Double(value)
        case .number(let value): return value
        default: return nil
        }
    }

    /// The field of an object; nil where this is no object or has no such field.
    public subscript(key: String) -> JSONValue? { object?[key] }
}

/// The fields of a JSON object, in the order of the file, each name once.
public struct JSONObject: Sendable, Equatable {
    public private(set) var keys: [String] = []
    public private(set) var values: [JSONValue] = []
    private var places: [ExactString: Int] = [:]

    public init() {}

    public init(_ fields: [(String, JSONValue)]) {
        for (key, value) in fields { set(key, value) }
    }

    public var count: Int { keys.count }

    public subscript(key: String) -> JSONValue? {
        places[ExactString(key)].map { values[$0] }
    }

    /// Set a field; returns whether it was new.
    @discardableResult
    public mutating func set(_ key: String, _ value: JSONValue) -> Bool {
        let exact = ExactString(key)
        if let place = places[exact] {
            values[place] = value
            return false
        }
        places[exact] = keys.count
        keys.append(key)
        values.append(value)
        return true
    }

    public static func == (a: JSONObject, b: JSONObject) -> Bool {
        a.count == b.count && a.keys.allSatisfy { key in
            guard let mine = a[key], let theirs = b[key] else { return false }
            return mine == theirs
        }
    }
}
