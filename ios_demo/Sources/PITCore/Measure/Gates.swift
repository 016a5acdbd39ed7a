/// What a runtime's outputs may differ from training, as pit_deploy/gates.py has it; the shared vectors compare them.
public struct Gate: Sendable, Equatable {
    /// Nil where the figure does not decide.
    public let maxAbs: Double?
    public let meanKL: Double
    public let top1: Double
    /// Whether the greedy continuation must be the reference's, ties aside.
    public let greedy: Bool
    /// Relative error of a layer's hidden state. An app has no hidden states and leaves it out.
    public let layer: Double

    /// Two logits closer than this are tied: either may be the largest.
    public static let tie = 1e-3

    private static let order = ["fp32", "fp16", "int8", "int4"]

    private static let common = [
        "fp32": Gate(maxAbs: 1e-3, meanKL: 1e-6, top1: 1, greedy: true, layer: 1e-3),
        "fp16": Gate(maxAbs: nil, meanKL: 1e-4, top1: 0.995, greedy: false, layer: 1e-2),
        "int8": Gate(maxAbs: nil, meanKL: 5e-3, top1: 0.95, greedy: false, layer: 0.15),
        "int4": Gate(maxAbs: nil, meanKL: 5e-2, top1: 0.90, greedy: false, layer: 0.5),
    ]

    /// Limits of a runtime where they are not the common ones: Core ML rounds every activation to float16, ExecuTorch
    /// rounds activations a whole token at a time.
    private static let special = [
        "coreml": [
            "fp16": Gate(maxAbs: nil, meanKL: 1e-3, top1: 0.99, greedy: false, layer: 5e-2),
            "int8": Gate(maxAbs: nil, meanKL: 7e-3, top1: 0.945, greedy: false, layer: 0.15),
        ],
        "executorch": [
            "int8": Gate(maxAbs: nil, meanKL: 2.5e-2, top1: 0.92, greedy: false, layer: 0.3),
            "int4": Gate(maxAbs: nil, meanKL: 0.15, top1: 0.75, greedy: false, layer: 0.8),
        ],
    ]

    /// The precision that decides the gate of a mixed setting: the coarser.
    public static func coarsest(_ weights: String, _ tables: String) -> String {
        let places = [weights, tables].compactMap { order.firstIndex(of: $0) }
        return order[places.max() ?? order.count - 1]
    }

    /// The gate of an artifact; the words are those of the manifest.
    public static func of(runtime: String, weights: String, tables: String) throws -> Gate {
        let precision = coarsest(weights, tables)
        guard let gate = special[runtime]?[precision] ?? common[precision] else {
            throw PITError.input("There is no gate for the precision \(precision).")
        }
        return gate
    }
}
