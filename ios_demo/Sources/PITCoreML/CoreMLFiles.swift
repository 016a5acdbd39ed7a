#if canImport(CoreML)
import CoreML
import Foundation
import PITCore

/// Which processors Core ML may use. `bundle` is what the manifest says.
public enum ComputeUnitChoice: String, CaseIterable, Sendable {
    case bundle, all, cpuAndGPU, cpuAndNeuralEngine, cpuOnly

    func units(_ program: Manifest.CoreMLProgram) throws -> MLComputeUnits {
        switch self == .bundle ? program.computeUnits : rawValue {
        case "all": return .all
        case "cpuAndGPU": return .cpuAndGPU
        case "cpuAndNeuralEngine": return .cpuAndNeuralEngine
        case "cpuOnly": return .cpuOnly
        case let word: throw PITError.input("Core ML has no compute units '\(word)'.")
        }
    }
}

/// Compiled packages, kept from one start to the next: compiling takes seconds to minutes.
public struct CompiledModels: Sendable {
    public let folder: URL

    public init(folder: URL) { self.folder = folder }

    /// The compiled form of a package of the bundle. What was compiled from another version of its files, or by another
    /// system, is removed.
    func compiled(_ package: String, of bundle: PITBundle) async throws -> URL {
        let files = FileManager.default
        let home = folder.appendingPathComponent(bundle.url.lastPathComponent)
        let system = ProcessInfo.processInfo.operatingSystemVersionString
        let hashes = bundle.manifest.files.filter { $0.path.utf8.starts(with: (package + "/").utf8) }.map(\.sha256)
        let key = Self.name(hashes.joined(separator: " ") + system)
        let stem = package.replacingOccurrences(of: "/", with: "_")
        let target = home.appendingPathComponent("\(stem)-\(key).mlmodelc")
        if files.fileExists(atPath: target.path) { return target }
        do {
            try files.createDirectory(at: home, withIntermediateDirectories: true)
            for old in try files.contentsOfDirectory(at: home, includingPropertiesForKeys: nil)
            where old.lastPathComponent.hasPrefix(stem + "-") {
                try files.removeItem(at: old)
            }
            let made = try await MLModel.compileModel(at: try bundle.file(package))
            try files.moveItem(at: made, to: target)
        } catch let error where !(error is PITError) {
            throw PITError.runtime(
                "Core ML cannot compile \(package) of \(bundle.url.lastPathComponent) (\(error.localizedDescription)); check "
                    + "that the system is \(bundle.manifest.coreml?.minimumSystem ?? "new enough") or newer and that there "
                    + "is room for \(bundle.modelBytes >> 20) MiB.")
        }
        return target
    }

    /// Remove what was compiled of a bundle.
    public func remove(_ bundle: URL) {
        try? FileManager.default.removeItem(at: folder.appendingPathComponent(bundle.lastPathComponent))
    }

    /// 16 digits of FNV-1a: a name for a folder, no proof of anything.
    private static func name(_ text: String) -> String {
        let hash = text.utf8.reduce(UInt64(0xcbf2_9ce4_8422_2325)) { ($0 ^ UInt64($1)) &* 0x100_0000_01b3 }
        return String(hash, radix: 16)
    }
}
#endif
