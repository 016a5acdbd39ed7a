/// A string that equals another only where the code points are the same.
///
/// Swift's own `==` and hashes treat "é" and "e" with an accent behind it as one string. A vocabulary, the paths of a
/// bundle and the keys of its JSON do not.
public struct ExactString: Hashable, Sendable, CustomStringConvertible {
    public let string: String

    public init(_ string: String) {
        var native = string
        native.makeContiguousUTF8()
        self.string = native
    }

    public var description: String { string }

    public static func == (a: ExactString, b: ExactString) -> Bool { a.string.utf8.elementsEqual(b.string.utf8) }

    public func hash(into hasher: inout Hasher) {
        let hashed: Void? = string.utf8.withContiguousStorageIfAvailable { hasher.combine(bytes: UnsafeRawBufferPointer($0)) }
        if hashed == nil {
            for byte in string.utf8 { hasher.combine(byte) }
        }
    }
}

extension String {
    /// Whether the code points are the same; `==` compares up to canonical equivalence.
    func isExactly(_ other: String) -> Bool { utf8.elementsEqual(other.utf8) }

    /// The code points from `start` up to `end`.
    init(_ scalars: some Sequence<Unicode.Scalar>) {
        var view = String.UnicodeScalarView()
        view.append(contentsOf: scalars)
        self = String(view)
    }
}

/// A value from a stranger's file, fit for one line: escaped and short.
func shown(_ text: String) -> String {
    var line = "'"
    for scalar in text.unicodeScalars {
        line += scalar.value < 32 || scalar.value == 127 ? scalar.escaped(asASCII: true) : String(scalar)
        if line.unicodeScalars.count > 76 { return line + "...'" }
    }
    return line + "'"
}
