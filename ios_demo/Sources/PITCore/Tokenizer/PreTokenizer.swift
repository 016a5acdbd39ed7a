/// A part of a text between added tokens; `startsText` where nothing stands before it.
struct Piece {
    var text: String
    var startsText: Bool
}

/// How a text is cut into the words that BPE works on.
enum PreTokenizer: Sendable {
    case sequence([PreTokenizer])
    case byteLevel(addPrefixSpace: Bool, words: RegexPattern?)
    case split(RegexPattern, SplitBehavior, invert: Bool)
    case digits(individual: Bool)
    case metaspace(replacement: String, prepend: Prepend, splits: RegexPattern?)

    enum Prepend: String, Sendable {
        case always, first, never
    }

    /// The words of byte-level tokenizers that name no pattern of their own.
    private static let words = "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

    init?(_ value: JSONValue?) throws {
        guard let value, !value.isNull else { return nil }
        let part = try TokenizerPart("pre-tokenizer", value)
        switch try part.kind() {
        case "Sequence":
            self = .sequence(try part.list("pretokenizers").compactMap { try PreTokenizer($0) })
        case "ByteLevel":
            let words = part.flag("use_regex", absent: true) ? try RegexPattern(Self.words) : nil
            self = .byteLevel(addPrefixSpace: part.flag("add_prefix_space", absent: true), words: words)
        case "Split":
            let name = try part.text("behavior")
            guard let behavior = SplitBehavior(rawValue: name) else {
                throw part.unknown("Split, behavior \(name)", "the five behaviours of tokenizers 0.22")
            }
            self = .split(try part.pattern(), behavior, invert: part.flag("invert", absent: false))
        case "Digits":
            self = .digits(individual: part.flag("individual_digits", absent: false))
        case "Metaspace":
            let replacement = try part.text("replacement")
            let old = part.flag("add_prefix_space", absent: true) ? Prepend.always : .never
            let scheme = part.object["prepend_scheme"]?.string.flatMap(Prepend.init(rawValue:)) ?? old
            let splits = part.flag("split", absent: true) ? try RegexPattern(literal: replacement) : nil
            self = .metaspace(replacement: replacement, prepend: scheme, splits: splits)
        case let kind:
            throw part.unknown(kind, "Sequence, ByteLevel, Split, Digits and Metaspace")
        }
    }

    func apply(_ pieces: [Piece]) -> [Piece] {
        if case .sequence(let steps) = self { return steps.reduce(pieces) { $1.apply($0) } }
        return pieces.flatMap { piece in
            words(of: piece).enumerated().map { Piece(text: $1, startsText: piece.startsText && $0 == 0) }
        }
    }

    private func words(of piece: Piece) -> [String] {
        var text = piece.text
        switch self {
        case .sequence: return [text]
        case .byteLevel(let addPrefixSpace, let words):
            if addPrefixSpace, text.utf8.first != UInt8(ascii: " ") { text = " " + text }
            return (words?.cut(text).map(\.text) ?? [text]).map(ByteAlphabet.encode)
        case .split(let pattern, let behavior, let invert):
            return behavior.join(pattern.cut(text).map { ($0.text, $0.isMatch != invert) })
        case .digits(let individual):
            return (individual ? SplitBehavior.isolated : .contiguous).join(numerals(text))
        case .metaspace(let replacement, let prepend, let splits):
            text = text.unicodeScalars.map { $0 == " " ? replacement : String($0) }.joined()
            let isAsked = prepend == .always || (prepend == .first && piece.startsText)
            if isAsked, !text.utf8.starts(with: replacement.utf8) { text = replacement + text }
            return splits.map { SplitBehavior.mergedWithNext.join($0.cut(text)) } ?? [text]
        }
    }
}

/// The text cut into single numerals and what lies between.
private func numerals(_ text: String) -> [(text: String, isMatch: Bool)] {
    var pieces: [(text: String, isMatch: Bool)] = []
    for scalar in text.unicodeScalars {
        let isNumeral: Bool
        switch scalar.properties.generalCategory {
        case .decimalNumber, .letterNumber, .otherNumber: isNumeral = true
        default: isNumeral = false
        }
        if !isNumeral, let last = pieces.last, !last.isMatch {
            pieces[pieces.count - 1].text.unicodeScalars.append(scalar)
        } else {
            pieces.append((String(scalar), isNumeral))
        }
    }
    return pieces
}
