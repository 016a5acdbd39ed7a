/// The tokenizer in a bundle's tokenizer.json: text to ids and back, as the library `tokenizers` does it.
///
/// Byte-pair encoding with the normalizers, pre-tokenizers and decoders that the supported families use; anything
/// else is an error when it is read. Cutting and padding, which a file may ask for, are left out.
public struct Tokenizer: Sendable {
    private let model: BytePairs
    private let normalizer: Normalizer?
    private let preTokenizer: PreTokenizer?
    private let decoder: Decoder?
    private let template: [TemplateItem]
    private let finder: AddedTokenFinder
    private let normalizedFinder: AddedTokenFinder
    private let texts: [Int: String]
    /// Ids of special tokens, which decoding leaves out.
    public let specialIds: Set<Int>

    private enum TemplateItem: Sendable {
        case text
        case special([Int])
    }

    /// Read the tokenizer of a bundle.
    public init(_ bundle: PITBundle) throws {
        try self.init(try bundle.json("tokenizer.json"))
    }

    public init(_ json: JSONObject) throws {
        model = try BytePairs(json["model"])
        let normalizer = try Normalizer(json["normalizer"])
        self.normalizer = normalizer
        preTokenizer = try PreTokenizer(json["pre_tokenizer"])
        decoder = try Decoder(json["decoder"])
        template = try Self.template(json["post_processor"]) ?? [.text]
        let added = try (json["added_tokens"]?.array ?? []).map { try AddedToken($0) }
        finder = AddedTokenFinder(added.filter { !$0.isNormalized })
        normalizedFinder = AddedTokenFinder(added.filter(\.isNormalized)) { normalizer?.apply($0.content) ?? $0.content }
        var texts: [Int: String] = [:]
        for (token, id) in model.tokens { texts[id] = token }
        for token in added { texts[token.id] = token.content }
        self.texts = texts
        specialIds = Set(added.filter(\.isSpecial).map(\.id))
    }

    /// 1 + the largest id.
    public var length: Int { (texts.keys.max() ?? -1) + 1 }

    /// The token as it stands in the file.
    public func token(_ id: Int) -> String? { texts[id] }

    /// The ids of a text. Special tokens inside it become their ids; with `addSpecialTokens` the tokenizer's template
    /// puts its own around them.
    public func encode(_ text: String, addSpecialTokens: Bool = false) -> [Int] {
        let ids = encodePlain(text)
        guard addSpecialTokens else { return ids }
        return template.flatMap { item in
            if case .special(let special) = item { return special } else { return ids }
        }
    }

    private func encodePlain(_ text: String) -> [Int] {
        var ids: [Int] = []
        var isFirst = true
        for part in finder.cut(text) {
            switch part {
            case .token(let id): ids.append(id)
            case .text(let raw):
                for part in normalizedFinder.cut(normalizer?.apply(raw) ?? raw) {
                    switch part {
                    case .token(let id): ids.append(id)
                    case .text(let text):
                        let pieces = [Piece(text: text, startsText: isFirst)]
                        for word in preTokenizer?.apply(pieces) ?? pieces { ids += model.encode(word.text) }
                    }
                    isFirst = false
                }
            }
            isFirst = false
        }
        return ids
    }

    /// The text of ids; unknown ids are left out, and so are special tokens unless they are asked for.
    public func decode(_ ids: [Int], skipSpecialTokens: Bool = true) -> String {
        let tokens = ids.compactMap { skipSpecialTokens && specialIds.contains($0) ? nil : texts[$0] }
        guard let decoder else { return tokens.joined(separator: " ") }
        return decoder.apply(tokens).joined()
    }

    /// Encode the manifest's check texts; throws at the first whose ids are others.
    public func check(_ manifest: Manifest) throws {
        for check in manifest.tokenizerChecks {
            let ids = encode(check.text)
            if ids != check.ids {
                throw PITError.bundle(
                    kind: .tokenizerMismatch,
                    "The tokenizer of this app encodes \(shown(check.text)) as \(ids), and the manifest says "
                        + "\(check.ids); report the model, and use another one until the app is mended.")
            }
        }
    }

    /// What the post-processor puts around one text; nil where it adds nothing.
    private static func template(_ value: JSONValue?) throws -> [TemplateItem]? {
        guard let value, !value.isNull else { return nil }
        let part = try TokenizerPart("post-processor", value)
        switch try part.kind() {
        case "ByteLevel": return nil
        case "Sequence":
            let found = try part.list("processors").compactMap { try template($0) }
            guard found.count <= 1 else { throw part.unknown("Sequence of several templates", "one template") }
            return found.first
        case "TemplateProcessing":
            return try part.list("single").map { item in
                if item["Sequence"] != nil { return .text }
                guard let name = item["SpecialToken"]?["id"]?.string,
                    let ids = part.object["special_tokens"]?[name]?["ids"]?.array?.compactMap(\.integer)
                else { throw part.missing("single", "sequences and special tokens with their ids") }
                return .special(ids)
            }
        case let kind:
            throw part.unknown(kind, "TemplateProcessing, ByteLevel and Sequence")
        }
    }
}
