import Foundation

/// Everything that can go wrong and that a user may meet. `sentence` is one sentence for people; the case is for code.
public enum PITError: Error, Equatable, Sendable {
    /// A bundle cannot be used. `kind` is the same word in every language that reads bundles.
    case bundle(kind: BundleFault, String)
    /// More tokens were asked for than the cache holds. Thrown before anything runs.
    case contextFull(used: Int, needed: Int, contextLength: Int)
    /// An argument, a setting or a file that the caller gave cannot be used.
    case input(String)
    /// The tokenizer of the bundle asks for something that this reader does not know.
    case tokenizer(String)
    /// The chat template of the bundle cannot be read, or stopped.
    case template(String)
    /// The runtime failed, or its model is not what the manifest says.
    case runtime(String)

    public var sentence: String {
        switch self {
        case .bundle(_, let text), .input(let text), .tokenizer(let text), .template(let text), .runtime(let text):
            return text
        case .contextFull(let used, let needed, let contextLength):
            return "The context is full: \(used) tokens are in the cache and \(needed) more were asked for, but the "
                + "artifact holds \(contextLength); shorten the prompt, start anew, or export with a larger --context."
        }
    }
}

extension PITError: LocalizedError, CustomStringConvertible {
    public var errorDescription: String? { sentence }
    public var description: String { sentence }
}

/// What is wrong with a bundle; `rawValue` is the word of docs/bundle.md.
public enum BundleFault: String, Sendable, CaseIterable {
    case notABundle = "not_a_bundle"
    case badJSON = "bad_json"
    case newerVersion = "newer_version"
    case olderVersion = "older_version"
    case missingField = "missing_field"
    case unknownField = "unknown_field"
    case badValue = "bad_value"
    case pathEscape = "path_escape"
    case unlistedFile = "unlisted_file"
    case badEndId = "bad_end_id"
    case badTokenId = "bad_token_id"
    case badVocabulary = "bad_vocabulary"
    case missingFile = "missing_file"
    case wrongSize = "wrong_size"
    case wrongHash = "wrong_hash"
    case unreadableFile = "unreadable_file"
    case tokenizerMismatch = "tokenizer_mismatch"
}

let fetchAgain = "export the bundle again, or fetch it again from where it came."
