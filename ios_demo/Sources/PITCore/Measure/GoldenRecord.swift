import Foundation

/// What the training-time model gave on a few prompts (docs/golden.md): the outputs, without the hidden states.
public struct GoldenRecord: Sendable {
    public static let version = 1

    public struct Prompt: Sendable {
        public let text: String
        public let ids: [Int]
    }

    public let prompts: [Prompt]
    public let greedyPrompt: Int
    public let greedyIds: [Int]
    public let greedyMargins: [Double]
    public let vocabSize: Int
    public let tokenizerLength: Int
    let topIds: [[Int]]
    let topLogits: [[Float]]
    let sampledIds: [Int]
    let sampledLogits: [[Float]]
    let logSumExp: [Double]

    /// Positions recorded, over all prompts.
    public var positions: Int { logSumExp.count }

    /// The first position of each prompt.
    public var starts: [Int] { prompts.indices.map { prompts[..<$0].reduce(0) { $0 + $1.ids.count } } }

    /// Read the record of a bundle. Throws where it carries none, or a damaged one.
    public init(_ bundle: PITBundle) throws {
        guard let golden = bundle.manifest.golden else {
            throw PITError.input("\(bundle.url.lastPathComponent) carries no golden record; export it again.")
        }
        let weights = golden.file.replacingSuffix(".json", with: ".safetensors")
        try self.init(json: try bundle.data(golden.file), tensors: try bundle.data(weights), file: golden.file)
    }

    public init(json: Data, tensors: Data, file: String) throws {
        let fault = { (reason: String) in
            PITError.bundle(kind: .badValue, "\(file): the golden record cannot be read: \(reason); export the bundle again.")
        }
        guard let object = try parseJSON(json, file: file).object else { throw fault("it is no object") }
        guard object["golden_version"]?.integer == Self.version else {
            throw fault("it has version \(object["golden_version"].map { jsonText($0) } ?? "none"), and this app reads \(Self.version)")
        }
        let prompts = try (object["prompts"]?.array ?? []).map { prompt in
            guard let text = prompt["text"]?.string, let ids = prompt["ids"]?.array?.compactMap(\.integer), !ids.isEmpty,
                ids.count == prompt["ids"]?.array?.count
            else { throw fault("a prompt is empty, or has no text or ids") }
            return Prompt(text: text, ids: ids)
        }
        guard let greedyPrompt = object["greedy_prompt"]?.integer, prompts.indices.contains(greedyPrompt),
            let greedyIds = object["greedy_ids"]?.array?.compactMap(\.integer),
            let margins = object["greedy_margins"]?.array?.compactMap(\.double), margins.count == greedyIds.count
        else { throw fault("the greedy continuation does not fit the prompts") }
        guard let vocabSize = object["vocab_size"]?.integer, let length = object["tokenizer_length"]?.integer,
            (1...vocabSize.magnitude).contains(length.magnitude), vocabSize > 0, length > 0
        else { throw fault("the vocabulary has no size") }
        let file = try SafeTensors(tensors, file: file)
        let positions = prompts.reduce(0) { $0 + $1.ids.count }
        sampledIds = try file.integers("sampled_ids")
        topIds = try Self.rows(try file.integers("top_ids"), try file.shape("top_ids"), positions, nil, fault)
        let columns = topIds.first?.count ?? 0
        topLogits = try Self.rows(try file.floats("top_logits"), try file.shape("top_logits"), positions, columns, fault)
        sampledLogits = try Self.rows(
            try file.floats("sampled_logits"), try file.shape("sampled_logits"), positions, sampledIds.count, fault)
        logSumExp = try file.doubles("logsumexp")
        (self.prompts, self.greedyPrompt, self.greedyIds, greedyMargins) = (prompts, greedyPrompt, greedyIds, margins)
        (self.vocabSize, tokenizerLength) = (vocabSize, length)
        guard logSumExp.count == positions, columns > 0 else { throw fault("logsumexp does not have \(positions) positions") }
        guard (topLogits + sampledLogits).joined().allSatisfy(\.isFinite), logSumExp.allSatisfy(\.isFinite) else {
            throw fault("it holds values that are not finite")
        }
        let ids = [prompts.flatMap(\.ids), greedyIds, sampledIds, topIds.flatMap { $0 }].joined()
        guard ids.allSatisfy({ (0..<vocabSize).contains($0) }) else {
            throw fault("an id is outside the vocabulary of \(vocabSize) rows")
        }
    }

    private static func rows<T>(
        _ values: [T], _ shape: [Int], _ count: Int, _ columns: Int?, _ fault: (String) -> PITError
    ) throws -> [[T]] {
        guard shape.count == 2, shape[0] == count, columns == nil || columns == shape[1] else {
            throw fault("a tensor has shape \(shape), and \(count) positions ask for another")
        }
        return (0..<count).map { Array(values[$0 * shape[1]..<($0 + 1) * shape[1]]) }
    }
}

extension String {
    func replacingSuffix(_ suffix: String, with other: String) -> String {
        hasSuffix(suffix) ? dropLast(suffix.count) + other : self
    }
}
