import PITCore
import SwiftUI

/// Chat with streaming text and a stop button.
struct ChatView: View {
    @State private var chat: ChatModel?
    @State private var failure: String?
    @State private var text = ""
    private let opened: OpenedBundle

    init(opened: OpenedBundle) { self.opened = opened }

    var body: some View {
        VStack(spacing: 0) {
            ScrollViewReader { reader in
                ScrollView {
                    LazyVStack(alignment: .leading, spacing: 12) {
                        ForEach(Array((chat?.messages ?? []).enumerated()), id: \.offset) { _, message in
                            MessageRow(isUser: message.role == .user, text: message.content)
                        }
                        if let answer = chat?.answer { MessageRow(isUser: false, text: answer.isEmpty ? "…" : answer) }
                        if let note = chat?.note { Text(note).font(.caption).foregroundStyle(.secondary) }
                        FailureRow(failure: chat?.failure ?? failure)
                        Color.clear.frame(height: 1).id("end")
                    }
                    .padding()
                }
                .onChange(of: chat?.answer) { reader.scrollTo("end") }
            }
            Divider()
            HStack {
                TextField("Message", text: $text, axis: .vertical)
                    .textFieldStyle(.roundedBorder)
                    .lineLimit(1...5)
                if chat?.isAnswering == true {
                    Button("Stop", systemImage: "stop.circle.fill") { chat?.stop() }
                } else {
                    Button("Send", systemImage: "arrow.up.circle.fill") {
                        chat?.send(text)
                        text = ""
                    }
                    .disabled(chat == nil || text.isEmpty)
                }
            }
            .labelStyle(.iconOnly)
            .padding()
        }
        .toolbar { Button("Clear", systemImage: "trash") { chat?.clear() }.disabled(chat?.isAnswering != false) }
        .onAppear { begin() }
        .onDisappear { chat?.stop() }
    }

    private func begin() {
        guard chat == nil else { return }
        do {
            chat = try ChatModel(opened)
        } catch {
            failure = error.localizedDescription
        }
    }
}

private struct MessageRow: View {
    let isUser: Bool
    let text: String

    var body: some View {
        Text(text)
            .textSelection(.enabled)
            .padding(10)
            .background(isUser ? Color.accentColor.opacity(0.15) : Color.secondary.opacity(0.1))
            .clipShape(RoundedRectangle(cornerRadius: 12))
            .frame(maxWidth: .infinity, alignment: isUser ? .trailing : .leading)
    }
}
