import Foundation

/// Fields of a part of tokenizer.json; faults name the part.
struct TokenizerPart {
    let name: String
    let object: JSONObject

    init(_ name: String, _ value: JSONValue) throws {
        guard let object = value.object else { throw PITError.tokenizer("tokenizer.json: \(name) is no object; \(fetchAgain)") }
        (self.name, self.object) = (name, object)
    }

    func kind() throws -> String { try text("type") }

    func text(_ key: String) throws -> String {
        guard let text = object[key]?.string else { throw missing(key, "a text") }
        return text
    }

    func flag(_ key: String, absent: Bool) -> Bool { object[key]?.bool ?? absent }

    func count(_ key: String) -> Int { object[key]?.integer ?? 0 }

    func list(_ key: String) throws -> [JSONValue] {
        guard let list = object[key]?.array else { throw missing(key, "a list") }
        return list
    }

    /// The pattern of a field that is `{"String": ...}` or `{"Regex": ...}`.
    func pattern() throws -> RegexPattern {
        if let text = object["pattern"]?["String"]?.string { return try RegexPattern(literal: text) }
        if let text = object["pattern"]?["Regex"]?.string { return try RegexPattern(text) }
        throw missing("pattern", "a String or a Regex")
    }

    func missing(_ key: String, _ expected: String) -> PITError {
        .tokenizer("tokenizer.json: '\(key)' of the \(name) should be \(expected); \(fetchAgain)")
    }

    func unknown(_ kind: String, _ known: String) -> PITError {
        .tokenizer(
            "tokenizer.json has the \(name) \(shown(kind)), which this app does not know (it knows \(known)); export a "
                + "model whose tokenizer is one of those.")
    }
}

/// What is done to a text before it is cut.
enum Normalizer: Sendable {
    case sequence([Normalizer])
    case nfc, nfd, nfkc, nfkd, lowercase
    case prepend(String)
    case replace(RegexPattern, String)
    case strip(left: Bool, right: Bool)

    init?(_ value: JSONValue?) throws {
        guard let value, !value.isNull else { return nil }
        let part = try TokenizerPart("normalizer", value)
        switch try part.kind() {
        case "Sequence": self = .sequence(try part.list("normalizers").compactMap { try Normalizer($0) })
        case "NFC": self = .nfc
        case "NFD": self = .nfd
        case "NFKC": self = .nfkc
        case "NFKD": self = .nfkd
        case "Lowercase": self = .lowercase
        case "Prepend": self = .prepend(try part.text("prepend"))
        case "Replace": self = .replace(try part.pattern(), try part.text("content"))
        case "Strip":
            self = .strip(left: part.flag("strip_left", absent: true), right: part.flag("strip_right", absent: true))
        case let kind:
            throw part.unknown(kind, "Sequence, NFC, NFD, NFKC, NFKD, Lowercase, Prepend, Replace and Strip")
        }
    }

    func apply(_ text: String) -> String {
        switch self {
        case .sequence(let steps): return steps.reduce(text) { $1.apply($0) }
        case .nfc: return text.precomposedStringWithCanonicalMapping
        case .nfd: return text.decomposedStringWithCanonicalMapping
        case .nfkc: return text.precomposedStringWithCompatibilityMapping
        case .nfkd: return text.decomposedStringWithCompatibilityMapping
        // Letter by letter: the whole text's lower case has a final sigma, and Rust's `char::to_lowercase` none.
        case .lowercase: return text.unicodeScalars.map(\.properties.lowercaseMapping).joined()
        case .prepend(let prefix): return text.isEmpty ? text : prefix + text
        case .replace(let pattern, let content): return pattern.replacingMatches(in: text, with: content)
        case .strip(let left, let right):
            var scalars = Array(text.unicodeScalars)[...]
            if left { scalars = scalars.drop { $0.properties.isWhitespace } }
            if right { while scalars.last?.properties.isWhitespace == true { scalars.removeLast() } }
            return String(scalars)
        }
    }
}

/// What becomes of the parts that a splitting pattern matches.
enum SplitBehavior: String, Sendable {
    case removed = "Removed"
    case isolated = "Isolated"
    case contiguous = "Contiguous"
    case mergedWithPrevious = "MergedWithPrevious"
    case mergedWithNext = "MergedWithNext"

    func join(_ pieces: [(text: String, isMatch: Bool)]) -> [String] {
        switch self {
        case .removed: return pieces.filter { !$0.isMatch }.map(\.text)
        case .isolated: return pieces.map(\.text)
        case .contiguous:
            return merged(pieces) { $0.isMatch == $1.isMatch }
        case .mergedWithPrevious:
            return merged(pieces) { !$0.isMatch && $1.isMatch }
        case .mergedWithNext:
            let backwards = pieces.reversed().map { $0 }
            var result: [String] = []
            for (place, piece) in backwards.enumerated() {
                if place > 0, piece.isMatch, !backwards[place - 1].isMatch {
                    result[result.count - 1] = piece.text + result[result.count - 1]
                } else {
                    result.append(piece.text)
                }
            }
            return result.reversed()
        }
    }

    private func merged(
        _ pieces: [(text: String, isMatch: Bool)],
        where together: ((text: String, isMatch: Bool), (text: String, isMatch: Bool)) -> Bool
    ) -> [String] {
        var result: [String] = []
        for (place, piece) in pieces.enumerated() {
            if place > 0, together(pieces[place - 1], piece) {
                result[result.count - 1] += piece.text
            } else {
                result.append(piece.text)
            }
        }
        return result
    }
}
