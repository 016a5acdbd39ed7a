/// JSON text of a value; `indent` nil is one line, as Python's `json.dumps(value, ensure_ascii=False)` writes it.
public func jsonText(_ value: JSONValue, indent: Int? = nil) -> String {
    var text = ""
    write(value, indent: indent, level: 0, into: &text)
    return text
}

private func write(_ value: JSONValue, indent: Int?, level: Int, into text: inout String) {
    switch value {
    case .null: text += "null"
    case .bool(let flag): text += flag ? "true" : "false"
    case .integer(let number): text += String(number)
    case .number(let number): text += numberText(number)
    case .string(let string): text += quoted(string)
    case .array(let items):
        block("[", "]", items.count, indent, level, &text) { place, text in
            write(items[place], indent: indent, level: level + 1, into: &text)
        }
    case .object(let object):
        block("{", "}", object.count, indent, level, &text) { place, text in
            text += quoted(object.keys[place]) + ": "
            write(object.values[place], indent: indent, level: level + 1, into: &text)
        }
    }
}

private func block(
    _ open: String, _ close: String, _ count: Int, _ indent: Int?, _ level: Int, _ text: inout String,
    item: (Int, inout String) -> Void
) {
    text += open
    for place in 0..<count {
        if place > 0 { text += indent == nil ? ", " : "," }
        if let indent { text += "\n" + String(repeating: " ", count: indent * (level + 1)) }
        item(place, &text)
    }
    if let indent, count > 0 { text += "\n" + String(repeating: " ", count: indent * level) }
    text += close
}

/// JSON has no NaN and no infinity: they become null.
private func numberText(_ number: Double) -> String { number.isFinite ? "\(number)" : "null" }

private func quoted(_ string: String) -> String {
    var text = "\""
    for scalar in string.unicodeScalars {
        switch scalar {
        case "\"": text += "\\\""
        case "\\": text += "\\\\"
        case "\n": text += "\\n"
        case "\r": text += "\\r"
        case "\t": text += "\\t"
        case "\u{08}": text += "\\b"
        case "\u{0C}": text += "\\f"
        default:
            if scalar.value < 0x20 {
                let digits = String(scalar.value, radix: 16)
                text += "\\u" + String(repeating: "0", count: 4 - digits.count) + digits
            } else {
                text.unicodeScalars.append(scalar)
            }
        }
    }
    return text + "\""
}
