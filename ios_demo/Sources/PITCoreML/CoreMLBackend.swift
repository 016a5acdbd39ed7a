#if canImport(CoreML)
import CoreML
import Dispatch
import Foundation
import PITCore

/// A Core ML bundle with one sequence: the functions `prefill` and `decode`, and one state for both. Programs of the
/// profile `stateless` pass their caches in and out.
///
/// Calls run one after the other on a queue of their own, so that they block no thread that Swift's tasks wait for.
public actor CoreMLBackend: DecoderBackend {
    public nonisolated let runtimeName: String
    public nonisolated let contextLength: Int
    public nonisolated let vocabSize: Int

    /// What is done while a bundle is loaded.
    public enum LoadStage: Sendable, Equatable {
        case compiling(String)
        case loading(String)
        case ready
    }

    private let plan: SequencePlan
    private let models: [String: MLModel]
    private let passed: [Manifest.TensorState]
    private var caches: [String: MLMultiArray] = [:]
    /// An `MLState`; nil before iOS 18, which has none, and for programs without states.
    private var state: AnyObject?
    private var count = 0

    private let queue = DispatchSerialQueue(label: "pit-deploy.coreml", qos: .userInitiated)
    public nonisolated var unownedExecutor: UnownedSerialExecutor { queue.asUnownedSerialExecutor() }

    /// Compile what was not compiled before, and load both functions. `progress` is told each stage.
    ///
    /// Throws `PITError.input` for a bundle of another runtime or a newer system, `PITError.runtime` where Core ML
    /// refuses it. Cancelling the task ends it between two stages.
    public static func load(
        _ bundle: PITBundle, units: ComputeUnitChoice = .bundle, compiled: CompiledModels,
        progress: @Sendable (LoadStage) async -> Void = { _ in }
    ) async throws -> CoreMLBackend {
        guard let program = bundle.manifest.coreml else {
            throw PITError.input(
                "\(bundle.url.lastPathComponent) is for \(bundle.manifest.runtime), and this is the Core ML runtime; export "
                    + "it with --to coreml.")
        }
        if program.minimumSystem == "iOS18", #unavailable(iOS 18, macOS 15) {
            throw PITError.input(
                "\(bundle.url.lastPathComponent) needs iOS 18; update the device, or export with --profile stateless.")
        }
        let plan = try SequencePlan(bundle.manifest)
        var models: [String: MLModel] = [:]
        for function in [plan.prefill, plan.decode].compactMap({ $0 }) {
            try Task.checkCancellation()
            await progress(.compiling(function.package))
            let url = try await compiled.compiled(function.package, of: bundle)
            await progress(.loading(function.name))
            models[function.name] = try await loadModel(url, function, try units.units(program))
        }
        let backend = try CoreMLBackend(bundle.manifest, plan, models)
        await progress(.ready)
        return backend
    }

    private static func loadModel(
        _ url: URL, _ function: Manifest.CoreMLFunction, _ units: MLComputeUnits
    ) async throws -> MLModel {
        let configuration = MLModelConfiguration()
        configuration.computeUnits = units
        if function.function != "main" {
            guard #available(iOS 18, macOS 15, *) else {
                throw PITError.input("Packages with several functions need iOS 18; export with --profile stateless.")
            }
            configuration.functionName = function.function
        }
        do {
            return try await MLModel.load(contentsOf: url, configuration: configuration)
        } catch {
            throw PITError.runtime(
                "Core ML cannot load the function \(function.name) (\(error.localizedDescription)); try other compute units, "
                    + "or export the bundle again.")
        }
    }

    private init(_ manifest: Manifest, _ plan: SequencePlan, _ models: [String: MLModel]) throws {
        self.plan = plan
        self.models = models
        passed = manifest.states.filter { $0.output != nil }
        contextLength = manifest.contextLength
        vocabSize = manifest.vocabSize
        runtimeName = "Core ML, \(ProcessInfo.processInfo.operatingSystemVersionString)"
        caches = try Self.emptyCaches(passed)
        if #available(iOS 18, macOS 15, *), manifest.states.count > passed.count {
            state = models["decode"]?.makeState()
        }
    }

    public func position() -> Int { count }

    public func append(_ ids: [Int]) throws -> [Float] {
        try checkRoom(ids, position: count)
        var logits: [Float] = []
        for call in plan.calls(ids, position: count) {
            logits = try run(call)
            count += call.real.count
        }
        return logits
    }

    /// What lies past the position is hidden by the program's mask, so that a state need not be emptied.
    public func reset() throws {
        count = 0
        caches = try Self.emptyCaches(passed)
    }

    private static func emptyCaches(_ states: [Manifest.TensorState]) throws -> [String: MLMultiArray] {
        try Dictionary(states.map { ($0.name, try MultiArrays.zeros($0)) }) { $1 }
    }

    /// A passed cache holds its newest token last, and cannot go back.
    public func rewind(to position: Int) throws -> Int {
        if position < count {
            if plan.passesCaches { try reset() } else { count = max(0, position) }
        }
        return count
    }

    private func run(_ call: FunctionCall) throws -> [Float] {
        guard let model = models[call.function.name] else {
            throw PITError.runtime("The function \(call.function.name) was not loaded.")
        }
        var values = [
            "input_ids": MLFeatureValue(multiArray: try MultiArrays.integers(call.ids, shape: [1, call.ids.count])),
            "position": MLFeatureValue(multiArray: try MultiArrays.integers([Int32(call.position)], shape: [1])),
        ]
        if let last = call.last {
            values["last"] = MLFeatureValue(multiArray: try MultiArrays.integers([Int32(last)], shape: [1]))
        }
        for (name, cache) in caches { values[name] = MLFeatureValue(multiArray: cache) }
        let outputs: any MLFeatureProvider
        do {
            outputs = try predict(model, try MLDictionaryFeatureProvider(dictionary: values))
        } catch {
            throw PITError.runtime(
                "Core ML failed in \(call.function.name) at position \(call.position) (\(error.localizedDescription)); start "
                    + "anew, or try other compute units.")
        }
        for cache in passed {
            guard let output = cache.output, let next = outputs.featureValue(for: output)?.multiArrayValue else {
                throw PITError.runtime("Core ML gives no \(cache.output ?? cache.name); export the bundle again.")
            }
            caches[cache.name] = next
        }
        guard let logits = outputs.featureValue(for: "logits")?.multiArrayValue else {
            throw PITError.runtime("Core ML gives no logits; export the bundle again.")
        }
        return try MultiArrays.row(logits, call: call, columns: vocabSize)
    }

    private func predict(_ model: MLModel, _ inputs: any MLFeatureProvider) throws -> any MLFeatureProvider {
        if #available(iOS 18, macOS 15, *), let state = state as? MLState {
            return try model.prediction(from: inputs, using: state)
        }
        return try model.prediction(from: inputs)
    }
}
#endif
