import PITCore
import PITCoreML
import SwiftUI
import UniformTypeIdentifiers

/// The bundles of the app: import from Files, choose, remove.
struct BundlesView: View {
    @Environment(AppModel.self) private var model
    @State private var isImporting = false
    @State private var isOpen = false

    var body: some View {
        @Bindable var model = model
        NavigationStack {
            List {
                if model.bundles.isEmpty {
                    ContentUnavailableView(
                        "No bundles", systemImage: "shippingbox",
                        description: Text("Import a folder that pit-deploy export --to coreml wrote."))
                }
                ForEach(model.bundles, id: \.self) { bundle in
                    Button(bundle.lastPathComponent) { model.open(bundle) }
                        .disabled(model.activity != nil)
                }
                .onDelete { places in
                    for bundle in places.map({ model.bundles[$0] }) { model.remove(bundle) }
                }
                Section("Compute units") {
                    Picker("Compute units", selection: $model.units) {
                        ForEach(ComputeUnitChoice.allCases, id: \.self) { Text($0.rawValue).tag($0) }
                    }
                }
                if let activity = model.activity { ActivityRow(activity: activity) { model.cancel() } }
                FailureRow(failure: model.failure)
            }
            .navigationTitle("PIT bundles")
            .toolbar {
                Button("Import", systemImage: "plus") { isImporting = true }
                    .disabled(model.activity != nil)
            }
            .fileImporter(isPresented: $isImporting, allowedContentTypes: [.folder]) { result in
                switch result {
                case .success(let url): model.add(url)
                case .failure(let error): model.failure = error.localizedDescription
                }
            }
            .navigationDestination(isPresented: $isOpen) {
                if let opened = model.opened { OpenedView(opened: opened, results: model.folders.results) }
            }
            .onChange(of: model.opened != nil) { _, isOpened in isOpen = isOpened }
            .onChange(of: isOpen) { _, isShown in
                if !isShown { model.close() }
            }
        }
    }
}

/// The screens of an open bundle.
struct OpenedView: View {
    let opened: OpenedBundle
    @State private var measurements: Measurements

    init(opened: OpenedBundle, results: URL) {
        self.opened = opened
        _measurements = State(initialValue: Measurements(opened, results: results))
    }

    var body: some View {
        TabView {
            ChatView(opened: opened).tabItem { Label("Chat", systemImage: "bubble.left.and.bubble.right") }
            BenchmarkView(measurements: measurements).tabItem { Label("Benchmark", systemImage: "gauge") }
            ParityView(measurements: measurements).tabItem { Label("Parity", systemImage: "equal.circle") }
        }
        .navigationTitle(opened.bundle.url.lastPathComponent)
        .navigationBarTitleDisplayMode(.inline)
        .onDisappear { measurements.cancel() }
    }
}

struct ActivityRow: View {
    let activity: Activity
    let cancel: @MainActor () -> Void

    var body: some View {
        HStack {
            ProgressView(value: activity.fraction) { Text(activity.title).font(.footnote) }
            Button("Cancel") { cancel() }
        }
    }
}

struct FailureRow: View {
    let failure: String?

    var body: some View {
        if let failure {
            Label(failure, systemImage: "exclamationmark.triangle")
                .font(.footnote)
                .foregroundStyle(.red)
                .textSelection(.enabled)
        }
    }
}
