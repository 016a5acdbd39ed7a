import Foundation

/// The bundles that an app keeps, a folder each below `folder`.
public struct BundleStore: Sendable {
    public let folder: URL

    public init(folder: URL) { self.folder = folder }

    /// Copy a bundle into the store, with every check made on the copy, hashes included.
    ///
    /// The copy lies in a temporary folder beside the others until it has passed, then it is renamed: a folder of
    /// the store is whole, or not there. Only the listed files are copied, links as the files they name. A bundle of
    /// the same name is replaced. On failure the store is as it was. `progress` gets the share that is done and may
    /// throw to end the work.
    public func add(_ source: URL, progress: (Double) throws -> Void = { _ in }) throws -> PITBundle {
        let given = try PITBundle.open(source)
        let files = FileManager.default
        let name = source.lastPathComponent
        let target = folder.appendingPathComponent(name)
        if target.standardizedFileURL == source.standardizedFileURL { return given }
        let partial = folder.appendingPathComponent(".\(name).partial-\(UUID().uuidString)")
        do {
            try files.createDirectory(at: partial, withIntermediateDirectories: true)
            defer { try? files.removeItem(at: partial) }
            let total = Double(max(1, given.totalBytes))
            var done = 0
            for entry in given.manifest.files.map(\.path) + ["manifest.json"] {
                let copy = partial.appendingPathComponent(entry)
                try files.createDirectory(at: copy.deletingLastPathComponent(), withIntermediateDirectories: true)
                try files.copyItem(at: source.appendingPathComponent(entry).resolvingSymlinksInPath(), to: copy)
                done += given.manifest.files.first { $0.path.isExactly(entry) }?.size ?? 0
                try progress(0.5 * min(1, Double(done) / total))
            }
            _ = try PITBundle.open(partial, checkHashes: true) { try progress(0.5 + 0.5 * $0) }
            try replace(target, by: partial)
        } catch let error as CocoaError {
            throw PITError.input(
                "The bundle \(name) cannot be copied to this device (\(error.localizedDescription)); check that there is "
                    + "room for \(given.totalBytes >> 20) MiB.")
        }
        return try PITBundle.open(target)
    }

    /// The folders of the store that hold a manifest, by name; unfinished copies of an app that was ended are removed.
    public func bundles() -> [URL] {
        let files = FileManager.default
        let found = (try? files.contentsOfDirectory(at: folder, includingPropertiesForKeys: nil)) ?? []
        for file in found where file.lastPathComponent.contains(".partial-") { try? files.removeItem(at: file) }
        return found.filter { !$0.lastPathComponent.hasPrefix(".") }
            .filter { files.fileExists(atPath: $0.appendingPathComponent("manifest.json").path) }
            .sorted { $0.lastPathComponent < $1.lastPathComponent }
    }

    public func remove(_ bundle: URL) throws {
        do {
            try FileManager.default.removeItem(at: bundle)
        } catch {
            throw PITError.input("\(bundle.lastPathComponent) cannot be removed (\(error.localizedDescription)).")
        }
    }

    /// Put `new` in the place of `target`; what was there comes back where that fails.
    private func replace(_ target: URL, by new: URL) throws {
        let files = FileManager.default
        guard files.fileExists(atPath: target.path) else { return try files.moveItem(at: new, to: target) }
        let old = folder.appendingPathComponent(".\(target.lastPathComponent).partial-\(UUID().uuidString)")
        try files.moveItem(at: target, to: old)
        do {
            try files.moveItem(at: new, to: target)
        } catch {
            try? files.moveItem(at: old, to: target)
            throw error
        }
        try? files.removeItem(at: old)
    }
}
