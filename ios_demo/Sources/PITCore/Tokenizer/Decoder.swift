/// How tokens become text again: a step takes tokens and gives tokens, and what is left is joined.
enum Decoder: Sendable {
    case sequence([Decoder])
    case byteLevel
    case byteFallback
    case fuse
    case replace(RegexPattern, String)
    case strip(Unicode.Scalar, start: Int, stop: Int)
    case metaspace(Unicode.Scalar, dropsFirst: Bool)

    init?(_ value: JSONValue?) throws {
        guard let value, !value.isNull else { return nil }
        let part = try TokenizerPart("decoder", value)
        switch try part.kind() {
        case "Sequence": self = .sequence(try part.list("decoders").compactMap { try Decoder($0) })
        case "ByteLevel": self = .byteLevel
        case "ByteFallback": self = .byteFallback
        case "Fuse": self = .fuse
        case "Replace": self = .replace(try part.pattern(), try part.text("content"))
        case "Strip":
            self = .strip(try Self.scalar(part, "content"), start: part.count("start"), stop: part.count("stop"))
        case "Metaspace":
            let scheme = part.object["prepend_scheme"]?.string
            let prepends = scheme.map { $0 != "never" } ?? part.flag("add_prefix_space", absent: true)
            self = .metaspace(try Self.scalar(part, "replacement"), dropsFirst: prepends)
        case let kind:
            throw part.unknown(kind, "Sequence, ByteLevel, ByteFallback, Fuse, Replace, Strip and Metaspace")
        }
    }

    private static func scalar(_ part: TokenizerPart, _ key: String) throws -> Unicode.Scalar {
        let text = try part.text(key).unicodeScalars
        guard text.count == 1, let scalar = text.first else { throw part.missing(key, "one character") }
        return scalar
    }

    func apply(_ tokens: [String]) -> [String] {
        switch self {
        case .sequence(let steps): return steps.reduce(tokens) { $1.apply($0) }
        case .byteLevel: return [String(decoding: tokens.flatMap(ByteAlphabet.decode), as: UTF8.self)]
        case .byteFallback: return bytesJoined(tokens)
        case .fuse: return [tokens.joined()]
        case .replace(let pattern, let content): return tokens.map { pattern.replacingMatches(in: $0, with: content) }
        case .strip(let scalar, let start, let stop):
            return tokens.map { token in
                var scalars = Array(token.unicodeScalars)[...]
                for _ in 0..<start where scalars.first == scalar { scalars.removeFirst() }
                for _ in 0..<stop where scalars.last == scalar { scalars.removeLast() }
                return String(scalars)
            }
        case .metaspace(let replacement, let dropsFirst):
            return tokens.enumerated().map { place, token in
                token.unicodeScalars.map { scalar in
                    scalar != replacement ? String(scalar) : place == 0 && dropsFirst ? "" : " "
                }.joined()
            }
        }
    }
}

/// Runs of `<0xNN>` as the text of their bytes; where a run is not UTF-8, a replacement character for each byte.
private func bytesJoined(_ tokens: [String]) -> [String] {
    var result: [String] = []
    var run: [UInt8] = []
    func endRun() {
        if let text = String(validating: run, as: UTF8.self) {
            if !run.isEmpty { result.append(text) }
        } else {
            result += run.map { _ in "\u{FFFD}" }
        }
        run = []
    }
    for token in tokens {
        if let byte = byteOfToken(token) {
            run.append(byte)
        } else {
            endRun()
            result.append(token)
        }
    }
    endRun()
    return result
}

/// The byte that a token like `<0x0A>` stands for.
func byteOfToken(_ token: String) -> UInt8? {
    let bytes = [UInt8](token.utf8)
    guard bytes.count == 6, bytes.starts(with: "<0x".utf8), bytes[5] == UInt8(ascii: ">") else { return nil }
    let digits = bytes[3...4]
    guard digits.allSatisfy({ Character(Unicode.Scalar($0)).isHexDigit && $0 < 128 }) else { return nil }
    return UInt8(String(decoding: digits, as: UTF8.self), radix: 16)
}
