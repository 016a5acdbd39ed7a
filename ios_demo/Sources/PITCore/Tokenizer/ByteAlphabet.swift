/// The 256 visible characters that byte-level tokenizers write in place of bytes.
enum ByteAlphabet {
    /// Printable bytes of Latin-1 stand for themselves, the others for the code points from 256 on.
    static let scalars: [Unicode.Scalar] = {
        let kept = Set(33...126).union(161...172).union(174...255)
        var next: UInt32 = 256
        return (0..<256).map { byte in
            if kept.contains(byte) { return Unicode.Scalar(UInt8(byte)) }
            defer { next += 1 }
            return Unicode.Scalar(next) ?? "?"
        }
    }()

    private static let bytes: [Unicode.Scalar: UInt8] = {
        var found: [Unicode.Scalar: UInt8] = [:]
        for (byte, scalar) in scalars.enumerated() { found[scalar] = UInt8(byte) }
        return found
    }()

    static func encode(_ text: String) -> String { String(text.utf8.map { scalars[Int($0)] }) }

    /// The bytes of a token; those of its own UTF-8 where a character of it stands for none, as in an added token.
    static func decode(_ token: String) -> [UInt8] {
        let found = token.unicodeScalars.compactMap { bytes[$0] }
        return found.count == token.unicodeScalars.count ? found : [UInt8](token.utf8)
    }
}
