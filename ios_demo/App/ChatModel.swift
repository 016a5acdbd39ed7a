import Foundation
import Observation
import PITCore

/// A chat with an open bundle, as the screen shows it.
@MainActor @Observable
final class ChatModel {
    private(set) var messages: [ChatMessage] = []
    /// What the model has said of its present answer.
    private(set) var answer: String?
    /// How the last answer went: tokens, speed, why it ended.
    private(set) var note: String?
    var failure: String?
    var maxNewTokens = 256

    private let session: ChatSession
    private let options: SamplingOptions
    private var work: Task<Void, Never>?

    /// Throws where the bundle has no chat template.
    init(_ opened: OpenedBundle) throws {
        guard let template = opened.template else {
            throw PITError.input("\(opened.bundle.url.lastPathComponent) has no chat template, so it cannot chat.")
        }
        session = ChatSession(opened.backend, opened.tokenizer, template, stopIds: opened.bundle.manifest.endIds)
        options = opened.options
    }

    var isAnswering: Bool { work != nil }

    func send(_ text: String) {
        guard work == nil, !text.isEmpty else { return }
        failure = nil
        note = nil
        answer = ""
        messages.append(ChatMessage(.user, text))
        work = Task {
            do {
                let made = try await session.answer(text, maxNewTokens: maxNewTokens, options: options) { event in
                    if case .text(let piece) = event { await self.show(piece) }
                }
                note = Self.note(made)
            } catch {
                failure = error.localizedDescription
            }
            messages = await session.messages
            answer = nil
            work = nil
        }
    }

    /// End the answer; what was said of it is kept.
    func stop() { work?.cancel() }

    func clear() {
        guard work == nil else { return }
        failure = nil
        note = nil
        work = Task {
            do {
                try await session.clear()
            } catch {
                failure = error.localizedDescription
            }
            messages = await session.messages
            work = nil
        }
    }

    private func show(_ piece: String) { answer = (answer ?? "") + piece }

    private static func note(_ made: Generation) -> String {
        let first = String(format: "%.2f s to the first token", made.prefill.seconds)
        let speed = String(format: "%.1f tokens a second", made.tokensPerSecond)
        switch made.finishReason {
        case .stop: return "\(first), \(speed)"
        case .length: return "\(first), \(speed); ended after \(made.ids.count) tokens"
        case .contextFull: return "\(first), \(speed); the context is full: clear the chat to go on"
        case .cancelled: return "\(first), \(speed); stopped"
        }
    }
}
