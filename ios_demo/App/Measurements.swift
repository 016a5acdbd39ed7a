import Foundation
import Observation
import PITCore

/// Runs the benchmark and the parity check of an open bundle, and keeps the results as files.
@MainActor @Observable
final class Measurements {
    private(set) var bench: BenchReport?
    private(set) var parity: ParityReport?
    private(set) var fraction: Double?
    /// The file written last.
    private(set) var file: URL?
    var failure: String?

    private let opened: OpenedBundle
    private let results: URL
    private var work: Task<Void, Never>?

    init(_ opened: OpenedBundle, results: URL) { (self.opened, self.results) = (opened, results) }

    var isRunning: Bool { work != nil }

    func cancel() { work?.cancel() }

    /// Compare the bundle with its golden record. The file has the object of `pit-deploy verify --json`.
    func verify() {
        start { me in
            let opened = me.opened
            let golden = try await Task.detached { try GoldenRecord(opened.bundle) }.value
            let report = try await Parity.verify(
                opened.backend, golden, manifest: opened.bundle.manifest, bundle: opened.bundle.url.lastPathComponent
            ) { fraction in
                try Task.checkCancellation()
                await MainActor.run { me.fraction = fraction }
            }
            me.parity = report
            me.file = try me.write(report.json, "parity")
        }
    }

    /// Measure speed and memory. The file has the object of `pit-deploy bench --json`.
    func measure() {
        start { me in
            let opened = me.opened
            let manifest = opened.bundle.manifest
            var report = BenchReport(
                createdBy: ["pit-deploy iOS demo": "1"], machine: Device.machine, settings: me.settings,
                name: opened.bundle.url.lastPathComponent, runtime: opened.backend.runtimeName,
                path: opened.bundle.url.lastPathComponent,
                precision: "\(manifest.precision.weights), tables \(manifest.precision.tables), \(manifest.layout)",
                modelBytes: opened.bundle.modelBytes, totalBytes: opened.bundle.totalBytes)
            let ids = manifest.golden?.prompts.flatMap(\.ids) ?? manifest.tokenizerChecks.flatMap(\.ids)
            do {
                report = try await Self.filled(report, opened, ids) { fraction in
                    try Task.checkCancellation()
                    await MainActor.run { me.fraction = fraction }
                }
            } catch let error as PITError {
                report.error = error.sentence
                me.failure = error.sentence
            }
            if let before = opened.memoryBeforeLoad, let after = opened.memoryAfterLoad, let peak = Device.memory?.peak {
                report.memory = BenchReport.Memory(beforeLoad: before, afterLoad: after, peak: peak)
            }
            report.notes += [Device.heatNote].compactMap { $0 }
            report.parity = me.parity
            me.bench = report
            me.file = try me.write(report.json, "bench")
        }
    }

    private nonisolated static func filled(
        _ report: BenchReport, _ opened: OpenedBundle, _ ids: [Int],
        progress: @escaping @Sendable (Double) async throws -> Void
    ) async throws -> BenchReport {
        var report = report
        try await Benchmark.run(opened.backend, ids: ids, loadSeconds: opened.loadSeconds, into: &report, progress: progress)
        return report
    }

    /// The usual settings, shortened to the bundle's context.
    private var settings: BenchReport.Settings {
        let usual = BenchReport.Settings(text: "the golden record's prompts")
        let room = opened.backend.contextLength
        let new = min(usual.newTokens, max(1, room / 4))
        return BenchReport.Settings(
            promptTokens: Array(Set(usual.promptTokens.map { min($0, room) })).sorted(),
            depths: Array(Set(usual.depths.map { max(0, min($0, room - new)) })).sorted(), newTokens: new,
            repeats: usual.repeats, text: usual.text)
    }

    private func write(_ json: JSONValue, _ kind: String) throws -> URL {
        let name = "\(kind)-\(opened.bundle.url.lastPathComponent)-\(Int(Date().timeIntervalSince1970)).json"
        do {
            try FileManager.default.createDirectory(at: results, withIntermediateDirectories: true)
            let file = results.appendingPathComponent(name)
            try Data((jsonText(json, indent: 1) + "\n").utf8).write(to: file, options: .atomic)
            return file
        } catch {
            throw PITError.input("The results cannot be written (\(error.localizedDescription)); make room on the device.")
        }
    }

    private func start(_ body: @escaping @MainActor (Measurements) async throws -> Void) {
        guard work == nil else { return }
        failure = nil
        fraction = 0
        work = Task {
            do {
                try await body(self)
            } catch is CancellationError {
                // The user asked for it.
            } catch {
                failure = error.localizedDescription
            }
            fraction = nil
            work = nil
        }
    }
}
