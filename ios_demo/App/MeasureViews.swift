import PITCore
import SwiftUI

/// Speed and memory, with the results as a file.
struct BenchmarkView: View {
    let measurements: Measurements

    var body: some View {
        List {
            RunSection(title: "Measure", measurements: measurements) { measurements.measure() }
            if let report = measurements.bench {
                Section("Medians of \(report.settings.repeats)") {
                    ForEach(report.prefill, id: \.tokens) { tokens, seconds in
                        Figure("Prefill of \(tokens)", speed(seconds, Double(tokens)))
                    }
                    ForEach(report.decode, id: \.depth) { depth, seconds in
                        Figure("Decode at depth \(depth)", speed(seconds, Double(report.settings.newTokens)))
                    }
                    ForEach(report.loadSeconds, id: \.self) { Figure("Load", String(format: "%.2f s", $0)) }
                    if let memory = report.memory {
                        Figure("Memory after load", "\(memory.afterLoad >> 20) MiB")
                        Figure("Peak", "\(memory.peak >> 20) MiB")
                    }
                }
                Section { ForEach(report.notes, id: \.self) { Text($0).font(.footnote) } }
            }
        }
    }

    private func speed(_ seconds: [Double], _ tokens: Double) -> String {
        Samples(seconds.map { tokens / $0 }).map { String(format: "%.1f tokens/s", $0.median) } ?? "–"
    }
}

/// The bundle against its golden record.
struct ParityView: View {
    let measurements: Measurements

    var body: some View {
        List {
            RunSection(title: "Compare with the golden record", measurements: measurements) { measurements.verify() }
            if let report = measurements.parity {
                Section(report.passed ? "Within tolerance" : "Out of tolerance") {
                    Figure("Positions", "\(report.positions.count)")
                    Figure("Mean KL", String(format: "%.2g (at most %.2g)", report.meanKL, report.gate.meanKL))
                    Figure("Top-1", String(format: "%.1f %% (at least %.1f %%)", 100 * report.top1, 100 * report.gate.top1))
                    Figure("Largest error", String(format: "%.2g", report.maxAbs))
                    Figure("Greedy tokens", "\(report.greedyEqual) of \(report.greedyTokens)")
                    ForEach(report.failures, id: \.self) { FailureRow(failure: $0) }
                }
            }
        }
    }
}

private struct RunSection: View {
    let title: String
    let measurements: Measurements
    let run: @MainActor () -> Void

    var body: some View {
        Section {
            if measurements.isRunning {
                ActivityRow(activity: Activity(title: title, fraction: measurements.fraction)) { measurements.cancel() }
            } else {
                Button(title) { run() }
            }
            if let file = measurements.file {
                ShareLink(item: file) { Label(file.lastPathComponent, systemImage: "square.and.arrow.up") }
            }
            FailureRow(failure: measurements.failure)
        }
    }
}

private struct Figure: View {
    private let name: String
    private let value: String

    init(_ name: String, _ value: String) { (self.name, self.value) = (name, value) }

    var body: some View { LabeledContent(name, value: value).monospacedDigit() }
}
