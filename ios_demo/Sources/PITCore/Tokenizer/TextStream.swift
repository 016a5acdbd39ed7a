/// Text from ids as they come: `push` gives what is final, `finish` the rest.
///
/// All pieces joined equal the decoding of all ids without special tokens. A character whose bytes are not complete
/// is held back, and so is a run of byte tokens (`<0x0A>`) until another token ends it, because decoders with byte
/// fallback judge such a run as a whole. A push decodes a window of at most 17 tokens (a run of byte tokens aside), so
/// the cost is linear.
public struct TextStream: Sendable {
    private let tokenizer: Tokenizer
    private var window: [Int] = []
    /// Characters of the window's text that were given out.
    private var given = 0

    /// Tokens kept before the new one: a cut-off character needs 3, decoders that look back fewer.
    private static let context = 8

    public init(_ tokenizer: Tokenizer) { self.tokenizer = tokenizer }

    /// Append one id and return the text that became final, often empty.
    public mutating func push(_ id: Int) -> String {
        guard let token = tokenizer.token(id), !tokenizer.specialIds.contains(id) else { return "" }
        window.append(id)
        if byteOfToken(token) != nil { return "" }
        let text = advance(to: finalText())
        if window.count > 2 * Self.context {
            window = Array(window.suffix(Self.context))
            given = finalText().count
        }
        return text
    }

    /// Return what was held back and start anew.
    public mutating func finish() -> String {
        let text = advance(to: Array(tokenizer.decode(window).unicodeScalars))
        (window, given) = ([], 0)
        return text
    }

    /// The window's text without a character at its end that may still be incomplete.
    private func finalText() -> [Unicode.Scalar] {
        let scalars = Array(tokenizer.decode(window).unicodeScalars)
        return scalars.last == "\u{FFFD}" ? scalars.dropLast() : scalars
    }

    private mutating func advance(to final: [Unicode.Scalar]) -> String {
        let new = final.dropFirst(given)
        given = max(given, final.count)
        return String(new)
    }
}
