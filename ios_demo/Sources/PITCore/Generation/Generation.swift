/// What one call of `generate` made, why it ended, and how long it took.
public struct Generation: Sendable, Equatable {
    public enum FinishReason: String, Sendable {
        case stop
        case length
        case contextFull = "context_full"
        case cancelled
    }

    /// Never holds the stop id.
    public let ids: [Int]
    public let finishReason: FinishReason
    /// The end id that was drawn; nil unless the reason is `stop`.
    public let stopId: Int?
    public let promptTokens: Int
    /// The prompt's run and the first draw: the time to the first token.
    public let prefill: Duration
    /// All later runs and draws.
    public let decode: Duration

    /// The id drawn last, which the cache lacks: a next turn's prompt begins with it.
    public var pendingIds: [Int] { stopId.map { [$0] } ?? ids.suffix(1) }

    /// Tokens drawn after the first (a stop id counts) by decode time; 0 where there are none.
    public var tokensPerSecond: Double {
        let drawn = ids.count + (stopId == nil ? 0 : 1) - 1
        return drawn > 0 && decode > .zero ? Double(drawn) / decode.seconds : 0
    }
}

extension Duration {
    public var seconds: Double { Double(components.seconds) + Double(components.attoseconds) * 1e-18 }
}

/// What `generate` is asked for, besides the prompt.
public struct GenerationRequest: Sendable {
    public var maxNewTokens: Int
    public var options: SamplingOptions
    public var stopIds: Set<Int>
    /// Ids already in the cache, for the repetition penalty.
    public var history: Set<Int>

    public init(maxNewTokens: Int, options: SamplingOptions = .greedy, stopIds: some Sequence<Int>, history: some Sequence<Int> = []) {
        self.maxNewTokens = maxNewTokens
        self.options = options
        self.stopIds = Set(stopIds)
        self.history = Set(history)
    }
}

/// Run the prompt, then draw up to `maxNewTokens` ids; every token runs through the model at most once.
///
/// The prompt is appended to what the cache holds, so a second turn passes only what is new: the first turn's
/// `pendingIds`, then the new message. Ends on a stop id, after `maxNewTokens`, when the last id no longer fits into
/// the context, or when `onToken` returns false or the task is cancelled; what was generated is kept. With
/// `maxNewTokens` 0 the model does not run. Throws `PITError.input` for an empty prompt or an unknown id and
/// `PITError.contextFull` for a prompt that does not fit, both before anything runs.
public func generate(
    _ prompt: [Int], with backend: some DecoderBackend, _ request: GenerationRequest,
    onToken: @Sendable (Int) async throws -> Bool = { _ in true }
) async throws -> Generation {
    if request.maxNewTokens < 0 {
        throw PITError.input("max_new_tokens must be 0 or more, but is \(request.maxNewTokens).")
    }
    try backend.checkRoom(prompt, position: await backend.position())
    let clock = ContinuousClock()
    var ids: [Int] = []
    var seen = request.history.union(prompt)
    var prefill = Duration.zero
    var decode = Duration.zero
    var isCancelled = false

    func ended(_ reason: Generation.FinishReason, stopId: Int? = nil) -> Generation {
        Generation(
            ids: ids, finishReason: reason, stopId: stopId, promptTokens: prompt.count, prefill: prefill, decode: decode)
    }

    while true {
        if isCancelled || Task.isCancelled { return ended(.cancelled) }
        if ids.count >= request.maxNewTokens { return ended(.length) }
        if !ids.isEmpty, await backend.position() >= backend.contextLength { return ended(.contextFull) }
        let start = clock.now
        let logits = try await backend.append(ids.isEmpty ? prompt : ids.suffix(1))
        // The position of the new token, and not its number within this turn, counts the generator's steps, so that
        // a second turn with the same seed does not meet the first turn's random numbers again.
        let step = UInt64(await backend.position())
        let id = try Sampling.draw(logits, request.options, step: step, previous: seen)
        let seconds = clock.now - start
        if ids.isEmpty { prefill = seconds } else { decode += seconds }
        if request.stopIds.contains(id) { return ended(.stop, stopId: id) }
        ids.append(id)
        seen.insert(id)
        isCancelled = !(try await onToken(id))
    }
}
