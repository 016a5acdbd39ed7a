import Foundation

/// A bundle that was checked when it was opened. The folder is only read.
public struct PITBundle: Sendable {
    public let url: URL
    public let manifest: Manifest

    fileprivate static let mostManifestBytes = 16 << 20

    /// Read the manifest and check that every file is there, inside the folder and of the declared size.
    ///
    /// With `checkHashes` all bytes are read and compared too; `progress` gets the share that is done. Throws
    /// `PITError.bundle` for whatever does not hold; no runtime has seen a byte by then.
    public static func open(
        _ url: URL, checkHashes: Bool = false, progress: (Double) throws -> Void = { _ in }
    ) throws -> PITBundle {
        let manifest = try Manifest.parse(try readManifest(url), file: url.appendingPathComponent("manifest.json").path)
        for entry in manifest.files { try checkFile(url, entry) }
        try checkLinks(url)
        let bundle = PITBundle(url: url, manifest: manifest)
        if checkHashes { try bundle.checkHashes(progress: progress) }
        return bundle
    }

    /// Read every listed file and throw at the first whose SHA-256 is another.
    public func checkHashes(progress: (Double) throws -> Void = { _ in }) throws {
        let total = manifest.files.reduce(1) { $0 + $1.size }
        var done = 0
        for entry in manifest.files {
            let file = url.appendingPathComponent(entry.path)
            let found: String
            do {
                found = try sha256(of: file) { count in
                    done += count
                    try progress(min(1, Double(done) / Double(total)))
                }
            } catch let error where !(error is CancellationError || error is PITError) {
                throw unreadable(file.path, error)
            }
            if found != entry.sha256 {
                throw PITError.bundle(
                    kind: .wrongHash,
                    "\(file.path) has changed: its SHA-256 starts with \(found.prefix(12)) and the manifest says "
                        + "\(entry.sha256.prefix(12)); \(fetchAgain)")
            }
        }
        try progress(1)
    }

    /// Where a listed file, or a folder of listed files, is.
    public func file(_ path: String) throws -> URL {
        guard manifest.lists(path) || manifest.listsFolder(path) else {
            throw PITError.bundle(
                kind: .missingFile, "The bundle \(url.lastPathComponent) has no file \(shown(path)); \(fetchAgain)")
        }
        return url.appendingPathComponent(path)
    }

    /// Bytes of the listed files and of the manifest.
    public var totalBytes: Int {
        let own = try? FileManager.default.attributesOfItem(atPath: url.appendingPathComponent("manifest.json").path)
        return manifest.files.reduce((own?[.size] as? NSNumber)?.intValue ?? 0) { $0 + $1.size }
    }

    /// Bytes of the model's files: of a folder all of them, and what lies beside a graph under a name that starts so.
    public var modelBytes: Int {
        let folders = Set(((manifest.coreml?.functions ?? []).map(\.package) + [manifest.modelFile]).map(ExactString.init))
        return manifest.files.reduce(0) { sum, entry in
            folders.contains { entry.path.utf8.starts(with: $0.string.utf8) } ? sum + entry.size : sum
        }
    }

    /// The JSON object in a listed file; empty where the bundle has no such file.
    public func json(_ name: String) throws -> JSONObject {
        guard manifest.lists(name) else { return JSONObject() }
        let place = url.appendingPathComponent(name)
        guard let object = try parseJSON(try read(place), file: place.path).object else {
            throw PITError.bundle(kind: .badJSON, "\(place.path) is not a JSON object; \(fetchAgain)")
        }
        return object
    }

    /// UTF-8 text of a listed file; nil where the bundle has no such file.
    public func text(_ name: String) throws -> String? {
        guard manifest.lists(name) else { return nil }
        let place = url.appendingPathComponent(name)
        guard let text = String(validating: try read(place), as: UTF8.self) else {
            throw PITError.bundle(kind: .unreadableFile, "\(place.path) is not UTF-8 text; \(fetchAgain)")
        }
        return text
    }

    public func data(_ name: String) throws -> Data { try read(try file(name)) }
}

// MARK: - Checks

private func readManifest(_ url: URL) throws -> Data {
    var isFolder: ObjCBool = false
    guard FileManager.default.fileExists(atPath: url.path, isDirectory: &isFolder), isFolder.boolValue else {
        let found = FileManager.default.fileExists(atPath: url.path) ? "is a file" : "does not exist"
        throw PITError.bundle(
            kind: .notABundle, "\(url.path) \(found), and a bundle is a folder; give the folder that holds manifest.json.")
    }
    let place = url.appendingPathComponent("manifest.json")
    if fileType(place) == nil {
        throw PITError.bundle(
            kind: .notABundle,
            "\(url.lastPathComponent) has no manifest.json; give the folder that pit-deploy export wrote.")
    }
    let size = try sizeOfFile(url, "manifest.json")
    if size > PITBundle.mostManifestBytes {
        throw PITError.bundle(
            kind: .wrongSize, "\(place.path) has \(size) bytes, and a manifest has \(PITBundle.mostManifestBytes) at most; \(fetchAgain)")
    }
    return try read(place)
}

private func checkFile(_ root: URL, _ entry: Manifest.FileEntry) throws {
    let size = try sizeOfFile(root, entry.path)
    if size != entry.size {
        throw PITError.bundle(
            kind: .wrongSize,
            "\(root.appendingPathComponent(entry.path).path) has \(size) bytes, and the manifest says \(entry.size); "
                + fetchAgain)
    }
}

/// Bytes of a plain file of the bundle; throws where it is none, or a link leads outside.
private func sizeOfFile(_ root: URL, _ path: String) throws -> Int {
    let file = root.appendingPathComponent(path)
    let isInside = try realPath(file.path).map { isBelow($0, try realPath(root.path) ?? root.path) }
    guard let isInside else {
        if try leadsOut(root, file) { throw escape(file) }
        throw PITError.bundle(
            kind: .missingFile, "\(file.path) is missing, and the manifest lists it; \(fetchAgain)")
    }
    guard isInside else { throw escape(file) }
    let attributes: [FileAttributeKey: Any]
    do {
        attributes = try FileManager.default.attributesOfItem(atPath: try realPath(file.path) ?? file.path)
    } catch {
        throw unreadable(file.path, error)
    }
    guard attributes[.type] as? FileAttributeType == .typeRegular, let size = attributes[.size] as? NSNumber else {
        throw PITError.bundle(
            kind: .missingFile, "\(file.path) is not a plain file, and the manifest lists a file; \(fetchAgain)")
    }
    return size.intValue
}

/// Throw where any link of the folder leads outside, listed or not: a model may name any file beside it.
private func checkLinks(_ root: URL) throws {
    guard let walk = FileManager.default.enumerator(at: root, includingPropertiesForKeys: nil) else {
        throw PITError.bundle(kind: .unreadableFile, "\(root.path) cannot be listed; check that you may read it.")
    }
    for case let file as URL in walk where fileType(file) == .typeSymbolicLink {
        if try leadsOut(root, file) { throw escape(file) }
    }
}

private func escape(_ file: URL) -> PITError {
    .bundle(
        kind: .pathEscape,
        "\(file.path) leads outside the bundle by a link, which is not followed; make a copy of the bundle with the "
            + "files in place of links, for example with cp -rL.")
}

/// The type of what is at `file` itself; nil where nothing is.
private func fileType(_ file: URL) -> FileAttributeType? {
    (try? FileManager.default.attributesOfItem(atPath: file.path))?[.type] as? FileAttributeType
}

/// The path with every link followed; nil where it is not there. Throws where links go in circles, or a folder on the
/// way may not be read.
private func realPath(_ path: String) throws -> String? {
    guard let resolved = realpath(path, nil) else {
        if errno == ENOENT || errno == ENOTDIR { return nil }
        throw PITError.bundle(
            kind: .unreadableFile, "\(path) cannot be read (\(String(cString: strerror(errno)))); \(fetchAgain)")
    }
    defer { free(resolved) }
    return String(cString: resolved)
}

/// Whether a link ends outside the folder, though what it names is not there.
private func leadsOut(_ root: URL, _ file: URL) throws -> Bool {
    let home = try realPath(root.path) ?? root.path
    if let real = try realPath(file.path) { return !isBelow(real, home) }
    // A dangling link on the way: follow it by hand, one link at a time.
    var path = file.path
    for _ in 0..<64 {
        guard let link = try? FileManager.default.destinationOfSymbolicLink(atPath: path) else { break }
        let folder = URL(fileURLWithPath: path).deletingLastPathComponent().path
        path = link.hasPrefix("/") ? link : (try realPath(folder) ?? folder) + "/" + link
        path = URL(fileURLWithPath: path).standardized.path
    }
    let folder = URL(fileURLWithPath: path).deletingLastPathComponent().path
    return !isBelow(try realPath(folder) ?? folder, home)
}

private func isBelow(_ path: String, _ root: String) -> Bool {
    path.isExactly(root) || path.utf8.starts(with: (root.hasSuffix("/") ? root : root + "/").utf8)
}

func read(_ file: URL) throws -> Data {
    do {
        return try Data(contentsOf: file, options: .mappedIfSafe)
    } catch {
        throw unreadable(file.path, error)
    }
}

private func unreadable(_ path: String, _ error: any Error) -> PITError {
    .bundle(
        kind: .unreadableFile,
        "\(path) cannot be read (\(error.localizedDescription)); check that it is a file which you may read.")
}
