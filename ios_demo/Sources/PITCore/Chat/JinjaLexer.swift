/// A template as text, printed expressions and statements, with white space as transformers sets Jinja to treat it:
/// `trim_blocks` (a line break behind a tag goes) and `lstrip_blocks` (space in front of a tag on its line goes).
struct JinjaLexer {
    enum Part {
        case text(String)
        case output([JinjaToken])
        case statement([JinjaToken])
    }

    private static let mostTokens = 1000

    private let source: [Unicode.Scalar]
    private var at = 0
    private var line = 1
    private var parts: [Part] = []
    /// Whether what was read last ended a line, as a tag with the line break behind it does.
    private var startsLine = true
    private var stripsNext = false

    static func parts(of template: String) throws -> [Part] {
        var lexer = JinjaLexer(template)
        try lexer.run()
        return lexer.parts
    }

    private init(_ template: String) {
        var scalars: [Unicode.Scalar] = []
        for scalar in template.unicodeScalars {
            if scalar == "\n", scalars.last == "\r" { scalars.removeLast() }
            scalars.append(scalar)
        }
        // Every kind of line break is one, and the one at the end of a file is not of the text.
        source = Array(scalars.map { $0 == "\r" ? "\n" : $0 }[...].dropLast(scalars.last == "\n" || scalars.last == "\r" ? 1 : 0))
    }

    private func starts(_ text: String, _ place: Int) -> Bool { source[place...].starts(with: text.unicodeScalars) }

    private mutating func run() throws {
        while at < source.count {
            let start = at
            while at < source.count, !(source[at] == "{" && at + 1 < source.count && "{%#".unicodeScalars.contains(source[at + 1])) {
                at += 1
            }
            let text = source[start..<at]
            guard at < source.count else {
                add(text)
                break
            }
            let opening = source[at + 1]
            at += 2
            let sign = at < source.count ? source[at] : " "
            if sign == "-" || sign == "+" { at += 1 }
            add(kept(text, sign: sign, opening: opening))
            line += text.count { $0 == "\n" }
            switch opening {
            case "#": try skipComment()
            case "{": try readTag(end: "}}") { .output($0) }
            default:
                if try !readRaw() { try readTag(end: "%}") { .statement($0) } }
            }
        }
    }

    private mutating func add(_ text: ArraySlice<Unicode.Scalar>) {
        let kept = stripsNext ? text.drop { $0.properties.isWhitespace } : text
        stripsNext = false
        if !kept.isEmpty { parts.append(.text(String(kept))) }
    }

    /// What of a text stays in front of a tag.
    private func kept(_ text: ArraySlice<Unicode.Scalar>, sign: Unicode.Scalar, opening: Unicode.Scalar) -> ArraySlice<Unicode.Scalar> {
        if sign == "-" {
            return text[..<((text.lastIndex { !$0.properties.isWhitespace }).map { $0 + 1 } ?? text.startIndex)]
        }
        guard sign != "+", opening != "{" else { return text }
        let lineBreak = text.lastIndex(of: "\n")
        guard lineBreak != nil || startsLine else { return text }
        let lineStart = lineBreak.map { $0 + 1 } ?? text.startIndex
        return text[lineStart...].allSatisfy(\.properties.isWhitespace) ? text[..<lineStart] : text
    }

    private mutating func skipComment() throws {
        while at < source.count, !starts("#}", at) { at += 1 }
        guard at < source.count else { throw fault("a comment does not end") }
        let sign = source[at - 1]
        at += 2
        endTag(sign: sign == "-" || sign == "+" ? sign : " ", trims: true)
    }

    /// What follows a tag that has just ended.
    private mutating func endTag(sign: Unicode.Scalar, trims: Bool) {
        stripsNext = sign == "-"
        startsLine = false
        if sign != "-", sign != "+", trims, at < source.count, source[at] == "\n" {
            at += 1
            line += 1
            startsLine = true
        }
    }

    private mutating func readTag(end: String, _ make: ([JinjaToken]) -> Part) throws {
        var tokens: [JinjaToken] = []
        var brackets: [Unicode.Scalar] = []
        while true {
            while at < source.count, source[at].properties.isWhitespace {
                if source[at] == "\n" { line += 1 }
                at += 1
            }
            guard at < source.count else { throw fault("a tag does not end") }
            if brackets.isEmpty {
                if starts(end, at) {
                    at += 2
                    endTag(sign: " ", trims: end == "%}")
                    break
                }
                if source[at] == "-" || source[at] == "+", starts(end, at + 1) {
                    let sign = source[at]
                    at += 3
                    endTag(sign: sign, trims: end == "%}")
                    break
                }
            }
            let token = try JinjaToken.read(source, &at, line)
            if case .symbol(let symbol) = token, let only = symbol.unicodeScalars.first, symbol.unicodeScalars.count == 1 {
                if "([{".unicodeScalars.contains(only) { brackets.append(only) }
                if ")]}".unicodeScalars.contains(only), brackets.popLast() == nil { throw fault("a bracket is closed that is not open") }
            }
            tokens.append(token)
            if tokens.count > Self.mostTokens { throw fault("a tag has more than \(Self.mostTokens) words and signs") }
        }
        parts.append(make(tokens))
    }

    /// Text between `{% raw %}` and `{% endraw %}`; returns false where the tag is another.
    private mutating func readRaw() throws -> Bool {
        var place = at
        func skipSpace() { while place < source.count, source[place].properties.isWhitespace { place += 1 } }
        skipSpace()
        guard starts("raw", place) else { return false }
        place += 3
        skipSpace()
        if place < source.count, source[place] == "-" { place += 1 }
        guard starts("%}", place) else { return false }
        let start = place + 2
        var end = start
        while end < source.count {
            place = end
            if starts("{%", place) {
                place += 2
                if place < source.count, source[place] == "-" { place += 1 }
                skipSpace()
                if starts("endraw", place) {
                    place += 6
                    skipSpace()
                    let sign = place < source.count ? source[place] : " "
                    if sign == "-" || sign == "+" { place += 1 }
                    guard starts("%}", place) else { break }
                    parts.append(.text(String(source[start..<end])))
                    at = place + 2
                    endTag(sign: sign, trims: true)
                    return true
                }
            }
            end += 1
        }
        throw fault("a raw part does not end")
    }

    private func fault(_ reason: String) -> PITError { templateSyntax(reason, line) }
}

func templateSyntax(_ reason: String, _ line: Int) -> PITError {
    .template("The chat template has a syntax error in line \(line): \(reason).")
}

/// A piece of an expression or statement.
enum JinjaToken: Equatable, Sendable {
    case name(String)
    case string(String)
    case integer(Int)
    case float(Double)
    case symbol(String)

    private static let symbols = [
        "**", "//", "==", "!=", "<=", ">=", "+", "-", "*", "/", "%", "~", "<", ">", "=", "(", ")", "[", "]", "{", "}",
        ",", ".", ":", "|",
    ]

    static func read(_ source: [Unicode.Scalar], _ at: inout Int, _ line: Int) throws -> JinjaToken {
        let first = source[at]
        if first == "'" || first == "\"" { return .string(try readString(source, &at, line)) }
        if isDigit(first) { return try readNumber(source, &at, line) }
        if first == "_" || first.properties.isXIDStart {
            let start = at
            while at < source.count, source[at] == "_" || source[at].properties.isXIDContinue { at += 1 }
            return .name(String(source[start..<at]))
        }
        for symbol in symbols where source[at...].starts(with: symbol.unicodeScalars) {
            at += symbol.unicodeScalars.count
            return .symbol(symbol)
        }
        throw templateSyntax("the character \(shown(String(first))) stands where none is expected", line)
    }

    private static func isDigit(_ scalar: Unicode.Scalar) -> Bool { ("0"..."9").contains(scalar) }

    private static func readNumber(_ source: [Unicode.Scalar], _ at: inout Int, _ line: Int) throws -> JinjaToken {
        let start = at
        func digits() { while at < source.count, isDigit(source[at]) || source[at] == "_" { at += 1 } }
        digits()
        var isFloat = false
        if at + 1 < source.count, source[at] == ".", isDigit(source[at + 1]) {
            isFloat = true
            at += 1
            digits()
        }
        if at < source.count, source[at] == "e" || source[at] == "E" {
            var end = at + 1
            if end < source.count, source[end] == "+" || source[end] == "-" { end += 1 }
            if end < source.count, isDigit(source[end]) {
                isFloat = true
                at = end
                digits()
            }
        }
        let text = String(source[start..<at].filter { $0 != "_" })
        if !isFloat, let value = Int(text) { return .integer(value) }
        guard let value = Double(text) else { throw templateSyntax("the number \(shown(text)) cannot be read", line) }
        return .float(value)
    }

    private static func readString(_ source: [Unicode.Scalar], _ at: inout Int, _ line: Int) throws -> String {
        let quote = source[at]
        at += 1
        var text: [Unicode.Scalar] = []
        while at < source.count, source[at] != quote {
            guard source[at] == "\\", at + 1 < source.count else {
                text.append(source[at])
                at += 1
                continue
            }
            let escaped = source[at + 1]
            at += 2
            if let plain = escapes[escaped] {
                if let plain { text.append(plain) }
            } else if let count = hexDigits[escaped] {
                let digits = String(source[at..<min(at + count, source.count)])
                guard digits.unicodeScalars.count == count, let code = UInt32(digits, radix: 16), let scalar = Unicode.Scalar(code)
                else { throw templateSyntax("an escape in a string is no character", line) }
                text.append(scalar)
                at += count
            } else {
                text += ["\\", escaped]
            }
        }
        guard at < source.count else { throw templateSyntax("a string does not end", line) }
        at += 1
        return String(text)
    }

    /// Python's escapes; nil is a line break that is left out.
    private static let escapes: [Unicode.Scalar: Unicode.Scalar?] = [
        "n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", "\"": "\"", "b": "\u{08}", "f": "\u{0C}", "a": "\u{07}",
        "v": "\u{0B}", "0": "\0", "\n": nil,
    ]
    private static let hexDigits: [Unicode.Scalar: Int] = ["x": 2, "u": 4, "U": 8]
}
