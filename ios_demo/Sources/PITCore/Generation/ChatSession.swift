/// What a chat gives while it answers.
public enum ChatEvent: Sendable, Equatable {
    /// Text that is final.
    case text(String)
    case finished(Generation)
}

/// A conversation with a bundle's model: its messages, and what of them lies in the cache.
///
/// Each turn renders the whole conversation by the model's own template and runs only what the cache lacks: the ids
/// that both have in front stay.
public actor ChatSession {
    public private(set) var messages: [ChatMessage]
    private let backend: any DecoderBackend
    private let tokenizer: Tokenizer
    private let template: ChatTemplate
    private let stopIds: [Int]
    private let system: [ChatMessage]
    private var cached: [Int] = []
    private var isAnswering = false

    public init(
        _ backend: any DecoderBackend, _ tokenizer: Tokenizer, _ template: ChatTemplate, stopIds: [Int], system: String? = nil
    ) {
        self.backend = backend
        self.tokenizer = tokenizer
        self.template = template
        self.stopIds = stopIds
        self.system = system.map { [ChatMessage(.system, $0)] } ?? []
        messages = self.system
    }

    /// Forget the conversation.
    public func clear() async throws {
        try await backend.reset()
        cached = []
        messages = system
    }

    /// Answer a message. Cancel the task to stop: what was answered is kept in the conversation.
    ///
    /// Throws `PITError.contextFull` before anything runs where the conversation does not fit, and then the
    /// conversation is as it was.
    @discardableResult
    public func answer(
        _ text: String, maxNewTokens: Int, options: SamplingOptions,
        onEvent: @escaping @Sendable (ChatEvent) async -> Void
    ) async throws -> Generation {
        guard !isAnswering else { throw PITError.input("The model is still answering; wait for it, or stop it.") }
        isAnswering = true
        defer { isAnswering = false }
        let asked = messages + [ChatMessage(.user, text)]
        let ids = tokenizer.encode(try template.render(asked))
        if ids.count > backend.contextLength {
            throw PITError.contextFull(used: 0, needed: ids.count, contextLength: backend.contextLength)
        }
        let new = try await keepPrefix(of: ids)
        let answer = Answer(tokenizer)
        let request = GenerationRequest(
            maxNewTokens: maxNewTokens, options: options, stopIds: stopIds, history: ids.prefix(ids.count - new.count))
        cached = []  // where this fails half way, the next turn must not believe the cache
        let generation: Generation
        do {
            generation = try await generate(new, with: backend, request) { id in
                let piece = await answer.push(id)
                if !piece.isEmpty { await onEvent(.text(piece)) }
                return true
            }
        } catch {
            try? await backend.reset()
            throw error
        }
        let position = await backend.position()
        cached = Array((ids + generation.ids).prefix(position))
        let rest = await answer.finish()
        if !rest.isEmpty { await onEvent(.text(rest)) }
        messages = asked + [ChatMessage(.assistant, await answer.text)]
        await onEvent(.finished(generation))
        return generation
    }

    /// Leave in the cache what it shares with `ids`, and return the ids that are left to run, at least one.
    private func keepPrefix(of ids: [Int]) async throws -> [Int] {
        let shared = min(zip(cached, ids).prefix { $0 == $1 }.count, ids.count - 1)
        let kept = try await backend.rewind(to: shared)
        cached = Array(ids.prefix(kept))
        return Array(ids.dropFirst(kept))
    }
}

/// The text of one answer as it grows.
private actor Answer {
    private(set) var text = ""
    private var stream: TextStream

    init(_ tokenizer: Tokenizer) { stream = TextStream(tokenizer) }

    func push(_ id: Int) -> String {
        let piece = stream.push(id)
        text += piece
        return piece
    }

    func finish() -> String {
        let piece = stream.finish()
        text += piece
        return piece
    }
}
