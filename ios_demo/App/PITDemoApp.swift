import SwiftUI

@main
struct PITDemoApp: App {
    @State private var model = AppModel(folders: .standard)

    var body: some Scene {
        WindowGroup {
            BundlesView()
                .environment(model)
                .task { await model.refresh() }
        }
    }
}
