/// What manifest.json says; docs/bundle.md explains each field. Names are those of the file, in Swift's spelling.
public struct Manifest: Sendable, Equatable {
    public static let format = "pit-deploy bundle"
    public static let formatVersion = 1

    public let createdBy: [String: String]
    public let source: Source
    public let folds: [String]
    public let layout: String
    public let runtime: String
    public let profile: String
    public let modelFile: String
    public let precision: Precision
    public let architecture: Architecture
    public let inputs: [TensorValue]
    public let outputs: [TensorValue]
    public let states: [TensorState]
    public let hiddenStates: [String]
    public let logits: String
    public let vocabSize: Int
    /// 1 + the tokenizer's largest id. Ids from there on are masked inside the graph.
    public let tokenizerLength: Int
    /// Tokens that the cache holds.
    public let contextLength: Int
    public let bosId: Int?
    /// Ids that end generation, any of them.
    public let endIds: [Int]
    public let chatTemplate: Bool
    public let quantization: [TensorError]
    public let quantizationSummary: QuantizationSummary?
    public let tokenizerChecks: [TokenizedText]
    public let coreml: CoreMLProgram?
    /// How the head shortlists the vocabulary; nil where it computes all logits in full.
    public let nestedHead: NestedHead?
    public let golden: GoldenEntry?
    public let files: [FileEntry]

    public struct Source: Sendable, Equatable {
        public let name: String
        public let modelType: String
        public let kind: String
        public let files: [FileEntry]
        public let license: String?
    }

    public struct NestedHead: Sendable, Equatable {
        public let columns: Int
        public let shortlist: Int
        public let missRate: Double?
        public let kl: Double?
        public let positions: Int?
    }

    public struct Precision: Sendable, Equatable {
        public let weights: String
        public let tables: String
        public let activations: String
        public let blockSize: Int?
        public let symmetric: Bool?
        public let accuracyLevel: Int?
        public let kvCache: String
    }

    public struct Architecture: Sendable, Equatable {
        public let modelType: String
        public let hiddenSize: Int
        public let numHiddenLayers: Int
        public let numAttentionHeads: Int
        public let numKeyValueHeads: Int
        public let headDim: Int
        public let intermediateSize: Int
    }

    /// A dimension of a tensor: a number, or the name of a free one.
    public enum Dimension: Sendable, Equatable {
        case fixed(Int)
        case free(String)
    }

    /// An input or output of the graph.
    public struct TensorValue: Sendable, Equatable {
        public let name: String
        public let dtype: String
        public let shape: [Dimension]

        /// The shape in numbers; nil where a dimension is free.
        public var fixedShape: [Int]? { numbers(shape) }
    }

    /// What is kept from one call to the next; `output` is nil where the runtime keeps it itself.
    public struct TensorState: Sendable, Equatable {
        public let name: String
        public let output: String?
        public let dtype: String
        public let shape: [Dimension]

        public var fixedShape: [Int]? { numbers(shape) }
    }

    public struct TensorError: Sendable, Equatable {
        public let name: String
        public let bits: Int
        public let blockSize: Int?
        public let symmetric: Bool
        public let relativeRms: Double
        public let maxAbs: Double
    }

    public struct QuantizationSummary: Sendable, Equatable {
        public let worst: String
        public let worstRelativeRms: Double
        public let meanRelativeRms: Double
    }

    public struct TokenizedText: Sendable, Equatable {
        public let text: String
        public let ids: [Int]
    }

    public struct CoreMLProgram: Sendable, Equatable {
        public let specificationVersion: Int
        public let minimumSystem: String
        public let computeUnits: String
        public let functions: [CoreMLFunction]
        public let parts: [CoreMLPart]
    }

    /// A function of a Core ML program: `tokens` is how many it takes, always.
    public struct CoreMLFunction: Sendable, Equatable {
        public let name: String
        public let package: String
        public let function: String
        public let tokens: Int
        public let inputs: [TensorValue]
        public let outputs: [TensorValue]
    }

    public struct CoreMLPart: Sendable, Equatable {
        public let name: String
        public let bytes: Int
        public let unit: String
        public let reason: String
    }

    public struct GoldenEntry: Sendable, Equatable {
        public let file: String
        public let positions: Int
        public let prompts: [TokenizedText]
    }

    public struct FileEntry: Sendable, Equatable {
        public let path: String
        public let size: Int
        public let sha256: String
    }
}

private func numbers(_ shape: [Manifest.Dimension]) -> [Int]? {
    let fixed = shape.compactMap { dimension in
        if case .fixed(let size) = dimension { return size } else { return nil }
    }
    return fixed.count == shape.count ? fixed : nil
}
