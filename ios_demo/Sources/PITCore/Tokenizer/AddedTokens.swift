/// Tokens beside the model's own, found in a text before it is cut into words.
struct AddedToken: Sendable {
    let id: Int
    let content: String
    let isSpecial: Bool
    let isNormalized: Bool
    let singleWord: Bool
    let stripsLeft: Bool
    let stripsRight: Bool

    init(_ value: JSONValue) throws {
        let part = try TokenizerPart("added token", value)
        guard let id = part.object["id"]?.integer, id >= 0, id <= Int(Int32.max) else { throw part.missing("id", "a token id") }
        self.id = id
        content = try part.text("content")
        isSpecial = part.flag("special", absent: false)
        isNormalized = part.flag("normalized", absent: true)
        singleWord = part.flag("single_word", absent: false)
        stripsLeft = part.flag("lstrip", absent: false)
        stripsRight = part.flag("rstrip", absent: false)
    }
}

/// Finds added tokens in a text: the leftmost first, of those at one place the longest.
struct AddedTokenFinder: Sendable {
    /// Contents as bytes, by first byte, longest first.
    private let byFirstByte: [UInt8: [(content: [UInt8], token: AddedToken)]]

    /// `content` is how a token stands in the text that is searched, normalised or not.
    init(_ tokens: [AddedToken], content: (AddedToken) -> String = { $0.content }) {
        var found: [UInt8: [(content: [UInt8], token: AddedToken)]] = [:]
        for token in tokens {
            let bytes = [UInt8](content(token).utf8)
            if let first = bytes.first { found[first, default: []].append((bytes, token)) }
        }
        byFirstByte = found.mapValues { $0.sorted { $0.content.count > $1.content.count } }
    }

    enum Part {
        case text(String)
        case token(Int)
    }

    func cut(_ text: String) -> [Part] {
        guard !byFirstByte.isEmpty else { return [.text(text)] }
        let bytes = [UInt8](text.utf8)
        var parts: [Part] = []
        var end = 0  // of what is in `parts`
        var at = 0
        while at < bytes.count {
            guard let (content, token) = match(bytes, at) else {
                at += 1
                continue
            }
            var start = at
            var stop = at + content.count
            at = stop
            if token.singleWord, endsWithWord(bytes[..<start]) || startsWithWord(bytes[stop...]) { continue }
            if token.stripsLeft { start = max(end, start - spaceAtEnd(bytes[..<start])) }
            if token.stripsRight { stop += spaceAtStart(bytes[stop...]) }
            if start > end { parts.append(.text(String(decoding: bytes[end..<start], as: UTF8.self))) }
            parts.append(.token(token.id))
            end = stop
            at = max(at, stop)
        }
        if end < bytes.count { parts.append(.text(String(decoding: bytes[end...], as: UTF8.self))) }
        return parts
    }

    private func match(_ bytes: [UInt8], _ at: Int) -> (content: [UInt8], token: AddedToken)? {
        byFirstByte[bytes[at]]?.first { bytes[at...].starts(with: $0.content) }
    }
}

private func endsWithWord(_ bytes: ArraySlice<UInt8>) -> Bool { scalars(bytes.suffix(4)).last.map(isOfWord) ?? false }

private func startsWithWord(_ bytes: ArraySlice<UInt8>) -> Bool { scalars(bytes.prefix(4)).first.map(isOfWord) ?? false }

private func spaceAtStart(_ bytes: ArraySlice<UInt8>) -> Int {
    scalars(bytes).prefix { $0.properties.isWhitespace }.reduce(0) { $0 + String($1).utf8.count }
}

private func spaceAtEnd(_ bytes: ArraySlice<UInt8>) -> Int {
    scalars(bytes).reversed().prefix { $0.properties.isWhitespace }.reduce(0) { $0 + String($1).utf8.count }
}

private func scalars(_ bytes: ArraySlice<UInt8>) -> String.UnicodeScalarView {
    String(decoding: bytes, as: UTF8.self).unicodeScalars
}

private func isOfWord(_ scalar: Unicode.Scalar) -> Bool {
    switch scalar.properties.generalCategory {
    case .decimalNumber, .connectorPunctuation, .nonspacingMark, .spacingMark, .enclosingMark: return true
    default: return scalar.properties.isAlphabetic
    }
}
