import Foundation

/// A pattern of a tokenizer.json, where it is matched by Oniguruma, as NSRegularExpression (ICU) matches it alike.
///
/// Both know Unicode classes, lookaround and possessive quantifiers. They differ in what `\s`, `\w` and `.` mean, and
/// in `^` and `$`, which are those of a line in Oniguruma's syntax: the former are written out, the latter set.
struct RegexPattern: Sendable {
    private let expression: NSRegularExpression

    init(_ pattern: String) throws {
        do {
            expression = try NSRegularExpression(
                pattern: Self.translated(pattern), options: [.useUnixLineSeparators, .anchorsMatchLines])
        } catch {
            throw PITError.tokenizer(
                "tokenizer.json has the pattern \(shown(pattern)), which cannot be read on this system; export with a "
                    + "tokenizer that splits by another one.")
        }
    }

    /// A pattern that matches `text` itself.
    init(literal text: String) throws {
        try self.init(unchecked: NSRegularExpression.escapedPattern(for: text))
    }

    private init(unchecked pattern: String) throws {
        do {
            expression = try NSRegularExpression(pattern: pattern)
        } catch {
            throw PITError.tokenizer("tokenizer.json has the pattern \(shown(pattern)), which cannot be searched for.")
        }
    }

    /// The text cut at every match: what matched, and what lies between; none is empty.
    func cut(_ text: String) -> [(text: String, isMatch: Bool)] {
        let units = text as NSString
        var pieces: [(text: String, isMatch: Bool)] = []
        var end = 0
        for match in expression.matches(in: text, range: NSRange(location: 0, length: units.length)) {
            let range = match.range
            guard range.length > 0 else { continue }
            if range.location > end {
                pieces.append((units.substring(with: NSRange(location: end, length: range.location - end)), false))
            }
            pieces.append((units.substring(with: range), true))
            end = range.location + range.length
        }
        if end < units.length { pieces.append((units.substring(from: end), false)) }
        return pieces
    }

    func replacingMatches(in text: String, with content: String) -> String {
        cut(text).map { $0.isMatch ? content : $0.text }.joined()
    }

    /// Write `\s`, `\S`, `\w` and `\W` out by property; inside a set too, where ICU takes properties and nested sets.
    static func translated(_ pattern: String) -> String {
        var result = ""
        var isEscaped = false
        for scalar in pattern.unicodeScalars {
            if isEscaped {
                result += classes[scalar] ?? "\\" + String(scalar)
                isEscaped = false
            } else if scalar == "\\" {
                isEscaped = true
            } else {
                result.unicodeScalars.append(scalar)
            }
        }
        return isEscaped ? result + "\\" : result
    }

    private static let classes: [Unicode.Scalar: String] = [
        "s": "\\p{White_Space}",
        "S": "\\P{White_Space}",
        "w": "[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}]",
        "W": "[^\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}]",
    ]
}
