import Foundation

/// Why a text is not JSON as a bundle has it.
public struct JSONFault: Error, Equatable, Sendable {
    public let reason: String
    public let line: Int
    public let column: Int
}

/// A strict reader of JSON in UTF-8: no repeated keys, no NaN, no infinities, no halves of surrogate pairs, at most
/// 200 levels. Foundation's reader accepts the first, and loses the order of fields and the form of numbers.
public struct JSONParser {
    private let bytes: [UInt8]
    private var at = 0
    private var depth = 0
    private static let deepest = 200

    public static func parse(_ data: Data) throws(JSONFault) -> JSONValue {
        try parse([UInt8](data))
    }

    public static func parse(_ bytes: [UInt8]) throws(JSONFault) -> JSONValue {
        var parser = JSONParser(bytes: bytes)
        guard String(validating: bytes, as: UTF8.self) != nil else { throw parser.fault("it is not UTF-8") }
        let value = try parser.value()
        parser.skipSpace()
        if parser.at < bytes.count { throw parser.fault("there is more text behind the value") }
        return value
    }

    private init(bytes: [UInt8]) { self.bytes = bytes }

    private func fault(_ reason: String) -> JSONFault {
        let before = bytes.prefix(at)
        let line = before.reduce(1) { $1 == UInt8(ascii: "\n") ? $0 + 1 : $0 }
        let lineStart = before.lastIndex(of: UInt8(ascii: "\n")).map { $0 + 1 } ?? 0
        return JSONFault(reason: reason, line: line, column: at - lineStart + 1)
    }

    private var next: UInt8? { at < bytes.count ? bytes[at] : nil }

    private mutating func skipSpace() {
        while let byte = next, byte == 0x20 || byte == 0x0A || byte == 0x0D || byte == 0x09 { at += 1 }
    }

    private mutating func take(_ character: Character) -> Bool {
        guard let byte = character.asciiValue, next == byte else { return false }
        at += 1
        return true
    }

    private mutating func value() throws(JSONFault) -> JSONValue {
        skipSpace()
        guard let byte = next else { throw fault("the text ends where a value should be") }
        switch byte {
        case UInt8(ascii: "{"): return .object(try object())
        case UInt8(ascii: "["): return .array(try array())
        case UInt8(ascii: "\""): return .string(try string())
        case UInt8(ascii: "t"): return try word("true", .bool(true))
        case UInt8(ascii: "f"): return try word("false", .bool(false))
        case UInt8(ascii: "n"): return try word("null", .null)
        default: return try number()
        }
    }

    private mutating func word(_ text: String, _ value: JSONValue) throws(JSONFault) -> JSONValue {
        guard bytes[at...].starts(with: text.utf8) else { throw fault("a value was expected") }
        at += text.utf8.count
        return value
    }

    private mutating func enter() throws(JSONFault) {
        depth += 1
        if depth > Self.deepest { throw fault("it is nested too deeply to be read") }
        at += 1
    }

    private mutating func object() throws(JSONFault) -> JSONObject {
        try enter()
        defer { depth -= 1 }
        var object = JSONObject()
        skipSpace()
        if take("}") { return object }
        while true {
            skipSpace()
            guard next == UInt8(ascii: "\"") else { throw fault("the name of a field was expected") }
            let key = try string()
            skipSpace()
            guard take(":") else { throw fault("':' was expected") }
            if !object.set(key, try value()) { throw fault("the key \(shown(key)) is there twice") }
            skipSpace()
            if take("}") { return object }
            guard take(",") else { throw fault("',' or '}' was expected") }
        }
    }

    private mutating func array() throws(JSONFault) -> [JSONValue] {
        try enter()
        defer { depth -= 1 }
        var items: [JSONValue] = []
        skipSpace()
        if take("]") { return items }
        while true {
            items.append(try value())
            skipSpace()
            if take("]") { return items }
            guard take(",") else { throw fault("',' or ']' was expected") }
        }
    }

    private mutating func number() throws(JSONFault) -> JSONValue {
        let start = at
        var isInteger = true
        _ = take("-")
        guard let first = next, isDigit(first) else { throw fault("a value was expected") }
        at += 1
        if first != UInt8(ascii: "0") { digits() }
        if take(".") {
            isInteger = false
            try someDigits()
        }
        if take("e") || take("E") {
            isInteger = false
            if !take("+") { _ = take("-") }
            try someDigits()
        }
        let text = String(decoding: bytes[start..<at], as: UTF8.self)
        if isInteger {
            return .integer(Int(text) ?? (text.hasPrefix("-") ? Int.min : Int.max))
        }
        guard let value = Double(text), value.isFinite else { throw fault("the number \(shown(text)) is too large") }
        return .number(value)
    }

    private func isDigit(_ byte: UInt8) -> Bool { byte >= UInt8(ascii: "0") && byte <= UInt8(ascii: "9") }

    private mutating func digits() {
        while let byte = next, isDigit(byte) { at += 1 }
    }

    private mutating func someDigits() throws(JSONFault) {
        guard let byte = next, isDigit(byte) else { throw fault("a digit was expected") }
        digits()
    }

    private mutating func string() throws(JSONFault) -> String {
        at += 1
        var text: [UInt8] = []
        var start = at
        while let byte = next {
            if byte == UInt8(ascii: "\"") {
                text += bytes[start..<at]
                at += 1
                return String(decoding: text, as: UTF8.self)
            }
            if byte == UInt8(ascii: "\\") {
                text += bytes[start..<at]
                at += 1
                text += String(try escape()).utf8
                start = at
            } else if byte < 0x20 {
                throw fault("a control character stands in a string")
            } else {
                at += 1
            }
        }
        throw fault("the text ends inside a string")
    }

    private mutating func escape() throws(JSONFault) -> Unicode.Scalar {
        guard let byte = next else { throw fault("the text ends inside a string") }
        at += 1
        switch byte {
        case UInt8(ascii: "\""), UInt8(ascii: "\\"), UInt8(ascii: "/"): return Unicode.Scalar(byte)
        case UInt8(ascii: "b"): return "\u{08}"
        case UInt8(ascii: "f"): return "\u{0C}"
        case UInt8(ascii: "n"): return "\n"
        case UInt8(ascii: "r"): return "\r"
        case UInt8(ascii: "t"): return "\t"
        case UInt8(ascii: "u"):
            let unit = try hex()
            if let scalar = Unicode.Scalar(unit) { return scalar }
            if unit < 0xDC00, bytes[at...].starts(with: "\\u".utf8) {
                at += 2
                let low = try hex()
                if (0xDC00..<0xE000).contains(low),
                    let scalar = Unicode.Scalar(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00))
                {
                    return scalar
                }
            }
            throw fault("an escape in it is half a surrogate pair, which is no character")
        default: throw fault("an unknown escape stands in a string")
        }
    }

    private mutating func hex() throws(JSONFault) -> UInt32 {
        var value: UInt32 = 0
        for _ in 0..<4 {
            guard let byte = next, let digit = Character(Unicode.Scalar(byte)).hexDigitValue, byte < 128 else {
                throw fault("four hexadecimal digits were expected")
            }
            value = value * 16 + UInt32(digit)
            at += 1
        }
        return value
    }
}
