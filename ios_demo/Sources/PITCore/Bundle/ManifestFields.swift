/// The fields of one object of a manifest, taken one by one; `end` refuses what was not taken.
final class Fields {
    private let object: JSONObject
    private let path: String
    private let file: String
    private var taken: Set<ExactString> = []

    init(_ object: JSONObject, path: String = "", file: String) {
        (self.object, self.path, self.file) = (object, path, file)
    }

    private func name(_ key: String) -> String { path.isEmpty ? key : "\(path).\(key)" }

    func failure(_ kind: BundleFault, _ key: String, _ reason: String) -> PITError {
        .bundle(kind: kind, "\(file): the field '\(name(key))' \(reason); \(fetchAgain)")
    }

    private func bad(_ key: String, _ value: JSONValue, _ expected: String) -> PITError {
        let text = jsonText(value)
        return failure(.badValue, key, "is \(text.count > 80 ? text.prefix(77) + "..." : text[...]): it should be \(expected)")
    }

    func value(_ key: String) throws -> JSONValue {
        guard let value = object[key] else { throw failure(.missingField, key, "is missing") }
        taken.insert(ExactString(key))
        return value
    }

    /// A text of 1 to `longest` characters.
    func text(_ key: String, longest: Int = 1024) throws -> String {
        let value = try value(key)
        guard let text = value.string, (1...longest).contains(text.unicodeScalars.count) else {
            throw bad(key, value, "a text of 1 to \(longest) characters")
        }
        return text
    }

    func anyText(_ key: String) throws -> String {
        let value = try value(key)
        guard let text = value.string else { throw bad(key, value, "a text") }
        return text
    }

    func word(_ key: String, _ words: [String]) throws -> String {
        let value = try value(key)
        guard let word = value.string, words.contains(where: word.isExactly) else {
            throw bad(key, value, "one of \(words.joined(separator: ", "))")
        }
        return word
    }

    func integer(_ key: String, _ allowed: ClosedRange<Int>) throws -> Int {
        let value = try value(key)
        guard let number = value.integer, allowed.contains(number) else {
            throw bad(key, value, "an integer from \(allowed.lowerBound) to \(allowed.upperBound)")
        }
        return number
    }

    /// A count of 32 bits, at least one.
    func count(_ key: String) throws -> Int { try integer(key, 1...Int(Int32.max)) }

    func flag(_ key: String) throws -> Bool {
        let value = try value(key)
        guard let flag = value.bool else { throw bad(key, value, "true or false") }
        return flag
    }

    /// A number of 0 or more.
    func figure(_ key: String) throws -> Double {
        let value = try value(key)
        guard let number = value.double, number >= 0 else { throw bad(key, value, "a number of 0 or more") }
        return number
    }

    /// Whether the file has the field, for those that may be left out.
    func has(_ key: String) -> Bool { object[key] != nil }

    /// Null, or what `read` makes of the field.
    func optional<T>(_ key: String, _ read: (Fields, String) throws -> T) throws -> T? {
        try value(key).isNull ? nil : try read(self, key)
    }

    func list<T>(_ key: String, atLeast: Int = 0, _ read: (JSONValue, String) throws -> T) throws -> [T] {
        let value = try value(key)
        guard let items = value.array, items.count >= atLeast else {
            throw bad(key, value, atLeast > 0 ? "a list that is not empty" : "a list")
        }
        return try items.enumerated().map { try read($1, "\(key).\($0)") }
    }

    func objects<T>(_ key: String, atLeast: Int = 0, _ read: (Fields) throws -> T) throws -> [T] {
        try list(key, atLeast: atLeast) { item, place in try self.inner(item, place, read) }
    }

    func object<T>(_ key: String, _ read: (Fields) throws -> T) throws -> T {
        try inner(try value(key), key, read)
    }

    private func inner<T>(_ value: JSONValue, _ key: String, _ read: (Fields) throws -> T) throws -> T {
        guard let object = value.object else { throw bad(key, value, "an object") }
        let fields = Fields(object, path: name(key), file: file)
        let result = try read(fields)
        try fields.end()
        return result
    }

    func texts(_ key: String) throws -> [String] {
        try list(key) { value, place in
            guard let text = value.string, (1...1024).contains(text.unicodeScalars.count) else {
                throw bad(place, value, "a text of 1 to 1024 characters")
            }
            return text
        }
    }

    /// Token ids, 0 to 2^31 - 1.
    func ids(_ key: String, atLeast: Int = 0) throws -> [Int] {
        try list(key, atLeast: atLeast) { value, place in
            guard let id = value.integer, (0...Int(Int32.max)).contains(id) else {
                throw bad(place, value, "a token id")
            }
            return id
        }
    }

    func shape(_ key: String) throws -> [Manifest.Dimension] {
        try list(key) { value, place in
            if let size = value.integer, (0...Int(Int32.max)).contains(size) { return .fixed(size) }
            if let name = value.string, !name.isEmpty, name.unicodeScalars.count <= 1024 { return .free(name) }
            throw bad(place, value, "a size or the name of a free dimension")
        }
    }

    /// Texts by name, neither empty.
    func textsByName(_ key: String) throws -> [String: String] {
        let value = try value(key)
        guard let object = value.object else { throw bad(key, value, "an object") }
        var found: [String: String] = [:]
        for (name, item) in zip(object.keys, object.values) {
            guard let text = item.string, !text.isEmpty, !name.isEmpty else {
                throw bad("\(key).\(name)", item, "a text that is not empty, under a name")
            }
            found[name] = text
        }
        return found
    }

    func sha256(_ key: String) throws -> String {
        let value = try value(key)
        guard let text = value.string, text.utf8.count == 64,
            text.utf8.allSatisfy({ (48...57).contains($0) || (97...102).contains($0) })
        else { throw bad(key, value, "64 lower-case hexadecimal digits") }
        return text
    }

    /// A path inside the bundle.
    func path(_ key: String) throws -> String {
        let path = try text(key)
        if let reason = pathFault(path) {
            throw failure(.pathEscape, key, "is \(shown(path)): \(reason)")
        }
        return path
    }

    /// Refuse fields that were not taken: one of them might change what the rest means.
    func end() throws {
        for key in object.keys where !taken.contains(ExactString(key)) {
            throw failure(.unknownField, key, "is none of format version \(Manifest.formatVersion)")
        }
    }
}

/// Why a path could leave the bundle, or be read in two ways; nil for a good one.
func pathFault(_ path: String) -> String? {
    if path.utf8.first == UInt8(ascii: "/") { return "it is an absolute path, and paths are relative to the bundle" }
    if path.unicodeScalars.contains(where: { $0 == "\\" || $0 == ":" || $0.value < 32 || $0.value == 127 }) {
        return "it holds a backslash, a colon or a control character, and paths have none"
    }
    // By bytes: a Character of Swift may be a slash with an accent on it.
    let parts = path.utf8.split(separator: UInt8(ascii: "/"), omittingEmptySubsequences: false)
    if parts.contains(where: { $0.elementsEqual("..".utf8) }) {
        return "it has the part '..', and paths may not leave the bundle"
    }
    if parts.contains(where: { $0.isEmpty || $0.elementsEqual(".".utf8) }) {
        return "it has an empty part or the part '.', and each part of a path is a name"
    }
    return nil
}
