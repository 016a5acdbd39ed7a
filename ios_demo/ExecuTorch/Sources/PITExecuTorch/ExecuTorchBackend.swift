#if canImport(ExecuTorch)
import Dispatch
import ExecuTorch
import Foundation
import PITCore

/// An ExecuTorch bundle with one sequence: the method `forward` of model.pte, whose cache lies in the program.
///
/// Calls run one after the other on a queue of their own, so that they block no thread that Swift's tasks wait for.
public actor ExecuTorchBackend: DecoderBackend {
    public nonisolated let runtimeName = "ExecuTorch"
    public nonisolated let contextLength: Int
    public nonisolated let vocabSize: Int

    private let module: Module
    private let name: String
    private var count = 0

    private let queue = DispatchSerialQueue(label: "pit-deploy.executorch", qos: .userInitiated)
    public nonisolated var unownedExecutor: UnownedSerialExecutor { queue.asUnownedSerialExecutor() }

    /// Open the program of a bundle, weights mapped. Throws `PITError.input` for a bundle of another runtime,
    /// `PITError.runtime` where ExecuTorch refuses it.
    public static func load(_ bundle: PITBundle) async throws -> ExecuTorchBackend {
        guard bundle.manifest.runtime == "executorch" else {
            throw PITError.input(
                "\(bundle.url.lastPathComponent) is for \(bundle.manifest.runtime), and this is the ExecuTorch runtime; "
                    + "export it with --to executorch.")
        }
        let backend = ExecuTorchBackend(bundle, try bundle.file(bundle.manifest.modelFile))
        try await backend.open()
        return backend
    }

    private init(_ bundle: PITBundle, _ model: URL) {
        module = Module(filePath: model.path, loadMode: .mmap)
        name = bundle.url.lastPathComponent
        contextLength = bundle.manifest.contextLength
        vocabSize = bundle.manifest.vocabSize
    }

    private func open() throws {
        do {
            try module.load("forward")
        } catch {
            throw PITError.runtime(
                "ExecuTorch cannot open the program of \(name) (\(error.localizedDescription)); link the backends and kernels "
                    + "that it uses, or take a newer ExecuTorch.")
        }
    }

    public func position() -> Int { count }

    public func append(_ ids: [Int]) throws -> [Float] {
        try checkRoom(ids, position: count)
        let tokens = Tensor<Int64>(ids.map(Int64.init), shape: [1, ids.count])
        let place = Tensor<Int64>([Int64(count)], shape: [1])
        let outputs: [Value]
        do {
            outputs = try module.forward([tokens, place])
        } catch {
            throw PITError.runtime(
                "ExecuTorch failed in \(name) at position \(count) (\(error.localizedDescription)); start anew, or export the "
                    + "bundle again.")
        }
        guard let logits: Tensor<Float> = outputs.first?.tensor(), logits.count > 0, logits.count % vocabSize == 0 else {
            throw PITError.runtime("ExecuTorch gives no logits of \(vocabSize) columns; export the bundle again.")
        }
        count += ids.count
        // Rows of all positions, or of the last alone: the last row is the one.
        return logits.withUnsafeBytes { Array($0.suffix(vocabSize)) }
    }

    /// What lies past the position is never read.
    public func reset() { count = 0 }

    public func rewind(to position: Int) -> Int {
        count = max(0, min(count, position))
        return count
    }
}
#endif
