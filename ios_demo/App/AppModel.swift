import Foundation
import Observation
import PITCore
import PITCoreML

#if canImport(PITExecuTorch)
import PITExecuTorch
#endif

/// Where the app keeps its files.
struct Folders: Sendable {
    let bundles: URL
    let compiled: URL
    let results: URL

    static var standard: Folders {
        let support = folder(.applicationSupportDirectory)
        return Folders(
            bundles: support.appendingPathComponent("bundles"), compiled: support.appendingPathComponent("compiled"),
            results: folder(.documentDirectory).appendingPathComponent("results"))
    }

    private static func folder(_ directory: FileManager.SearchPathDirectory) -> URL {
        FileManager.default.urls(for: directory, in: .userDomainMask).first ?? FileManager.default.temporaryDirectory
    }
}

/// A bundle that is loaded and ready to run.
struct OpenedBundle: Sendable {
    let bundle: PITBundle
    let tokenizer: Tokenizer
    /// Nil where the bundle has no chat template: it continues texts then.
    let template: ChatTemplate?
    let options: SamplingOptions
    let backend: any DecoderBackend
    let loadSeconds: Double
    let memoryBeforeLoad: Int?
    let memoryAfterLoad: Int?
}

/// What the app shows while something takes long.
struct Activity: Equatable, Sendable {
    var title: String
    /// 0 to 1; nil where it is not known.
    var fraction: Double?
}

/// The bundles of the app and the one that is open.
@MainActor @Observable
final class AppModel {
    private(set) var bundles: [URL] = []
    private(set) var opened: OpenedBundle?
    private(set) var activity: Activity?
    /// A sentence for the user.
    var failure: String?
    var units = ComputeUnitChoice.bundle

    let folders: Folders
    private var work: Task<Void, Never>?
    private var store: BundleStore { BundleStore(folder: folders.bundles) }
    private var compiled: CompiledModels { CompiledModels(folder: folders.compiled) }

    init(folders: Folders) { self.folders = folders }

    func refresh() async {
        let store = store
        bundles = await Task.detached { store.bundles() }.value
    }

    /// Copy a bundle that was chosen in Files into the app, all checks made.
    func add(_ source: URL) {
        let store = store
        start("Copying and checking \(source.lastPathComponent)") { model in
            let isScoped = source.startAccessingSecurityScopedResource()
            defer { if isScoped { source.stopAccessingSecurityScopedResource() } }
            try await Self.detached { report in
                try Self.coordinated(source) { folder in
                    _ = try store.add(folder) { fraction in
                        try Task.checkCancellation()
                        report(fraction)
                    }
                }
            } progress: { model.activity?.fraction = $0 }
            await model.refresh()
        }
    }

    func remove(_ bundle: URL) {
        let (store, compiled) = (store, compiled)
        if opened?.bundle.url == bundle { opened = nil }
        start("Removing \(bundle.lastPathComponent)") { model in
            try await Task.detached {
                compiled.remove(bundle)
                try store.remove(bundle)
            }.value
            await model.refresh()
        }
    }

    /// Check a bundle of the store, compile it where that was not done, and load it.
    func open(_ url: URL) {
        opened = nil
        let (compiled, units) = (compiled, units)
        start("Opening \(url.lastPathComponent)") { model in
            let (bundle, tokenizer, template) = try await Task.detached {
                let bundle = try PITBundle.open(url)
                let tokenizer = try Tokenizer(bundle)
                try tokenizer.check(bundle.manifest)
                return (bundle, tokenizer, try ChatTemplate(bundle))
            }.value
            let options = try SamplingOptions(generationConfig: try bundle.json("generation_config.json"))
            let before = Device.memory?.resident
            let start = ContinuousClock.now
            let backend = try await Self.load(bundle, units, compiled) { title in
                await MainActor.run { model.activity = Activity(title: title, fraction: nil) }
            }
            model.opened = OpenedBundle(
                bundle: bundle, tokenizer: tokenizer, template: template, options: options, backend: backend,
                loadSeconds: (ContinuousClock.now - start).seconds, memoryBeforeLoad: before,
                memoryAfterLoad: Device.memory?.resident)
        }
    }

    func close() { opened = nil }

    func cancel() { work?.cancel() }

    private static func load(
        _ bundle: PITBundle, _ units: ComputeUnitChoice, _ compiled: CompiledModels,
        stage: @escaping @Sendable (String) async -> Void
    ) async throws -> any DecoderBackend {
        if bundle.manifest.runtime == "coreml" {
            return try await CoreMLBackend.load(bundle, units: units, compiled: compiled) { loading in
                switch loading {
                case .compiling(let package): await stage("Preparing \(package) for this device")
                case .loading(let function): await stage("Loading \(function)")
                case .ready: break
                }
            }
        }
        #if canImport(PITExecuTorch)
        if bundle.manifest.runtime == "executorch" { return try await ExecuTorchBackend.load(bundle) }
        #endif
        throw PITError.input(
            "\(bundle.url.lastPathComponent) is for \(bundle.manifest.runtime), which is not in this app; export it with "
                + "--to coreml.")
    }

    /// Run something long, one at a time; its error is shown.
    private func start(_ title: String, _ body: @escaping @MainActor (AppModel) async throws -> Void) {
        guard work == nil else { return }
        activity = Activity(title: title, fraction: nil)
        failure = nil
        work = Task {
            do {
                try await body(self)
            } catch is CancellationError {
                // The user asked for it.
            } catch {
                failure = error.localizedDescription
            }
            activity = nil
            work = nil
        }
    }

    /// Read a folder that may lie in a cloud: the system fetches its files first.
    private nonisolated static func coordinated(_ source: URL, _ body: (URL) throws -> Void) throws {
        #if canImport(Darwin)
        var result = Result<Void, any Error>.success(())
        var failure: NSError?
        NSFileCoordinator().coordinate(readingItemAt: source, options: [], error: &failure) { folder in
            result = Result { try body(folder) }
        }
        if let failure { throw failure }
        try result.get()
        #else
        try body(source)
        #endif
    }

    /// Run blocking work away from the main actor; cancelled with the task that waits for it.
    private static func detached(
        _ body: @escaping @Sendable (@Sendable (Double) -> Void) throws -> Void,
        progress: @escaping @MainActor @Sendable (Double) -> Void
    ) async throws {
        let task = Task.detached { try body { fraction in Task { @MainActor in progress(fraction) } } }
        try await withTaskCancellationHandler {
            try await task.value
        } onCancel: {
            task.cancel()
        }
    }
}
