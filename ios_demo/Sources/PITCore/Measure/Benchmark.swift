/// Times prefill and decode of a backend as docs/benchmarks.md says, in one process, since an app has one.
public enum Benchmark {
    /// Fill `report` with the figures of `backend` on `ids`, which are repeated where they are too few.
    ///
    /// The first run is the time to the first token after `loadSeconds`; then one warm pass, then each round measures
    /// every figure once, so that what the device does meanwhile meets all of them. Throws before anything runs where
    /// the context is too short. `progress` gets the share that is done and may throw to end the work; what was
    /// measured until then is in the report.
    public static func run(
        _ backend: some DecoderBackend, ids: [Int], loadSeconds: Double, into report: inout BenchReport,
        progress: @Sendable (Double) async throws -> Void = { _ in }
    ) async throws {
        let settings = report.settings
        guard settings.neededTokens <= backend.contextLength else {
            throw PITError.input(
                "The bundle holds \(backend.contextLength) tokens, and the benchmark asks for \(settings.neededTokens); "
                    + "measure shorter prompts, or export with a larger --context.")
        }
        guard !ids.isEmpty, !settings.promptTokens.isEmpty, settings.promptTokens.allSatisfy({ $0 > 0 }),
            settings.newTokens > 0, settings.repeats > 0
        else { throw PITError.input("The benchmark needs a text, a prompt, new tokens and repeats of at least one.") }
        let text = (0..<settings.neededTokens).map { ids[$0 % ids.count] }
        let shortest = settings.promptTokens.min() ?? 1
        try await backend.reset()
        let first = try await ContinuousClock().measure {
            _ = try Sampling.greedy(try await backend.append(Array(text.prefix(shortest))))
        }
        report.loadSeconds.append(loadSeconds)
        report.firstTokenSeconds.append(loadSeconds + first.seconds)
        _ = try await prefillSeconds(backend, Array(text.prefix(settings.promptTokens.max() ?? 1)))

        report.prefill = settings.promptTokens.map { ($0, []) }
        report.decode = settings.depths.map { ($0, []) }
        let total = Double(settings.repeats * (settings.promptTokens.count + settings.depths.count))
        var done = 0.0
        for _ in 0..<settings.repeats {
            for (place, tokens) in settings.promptTokens.enumerated() {
                report.prefill[place].seconds.append(try await prefillSeconds(backend, Array(text.prefix(tokens))))
                done += 1
                try await progress(done / total)
            }
            for (place, depth) in settings.depths.enumerated() {
                let new = text[depth..<depth + settings.newTokens]
                report.decode[place].seconds.append(try await decodeSeconds(backend, Array(text.prefix(depth)), Array(new)))
                done += 1
                try await progress(done / total)
            }
        }
        try await backend.reset()
    }

    /// From the ids to the first greedy token, empty cache.
    private static func prefillSeconds(_ backend: some DecoderBackend, _ ids: [Int]) async throws -> Double {
        try await wake(backend, ids)
        return try await ContinuousClock().measure { _ = try Sampling.greedy(try await backend.append(ids)) }.seconds
    }

    private static func decodeSeconds(_ backend: some DecoderBackend, _ context: [Int], _ ids: [Int]) async throws -> Double {
        try await wake(backend, ids)
        if !context.isEmpty { _ = try await backend.append(context) }
        return try await ContinuousClock().measure {
            for id in ids { _ = try Sampling.greedy(try await backend.append([id])) }
        }.seconds
    }

    /// A few untimed tokens, so that the processor is awake; then an empty cache.
    private static func wake(_ backend: some DecoderBackend, _ ids: [Int]) async throws {
        try await backend.reset()
        for id in ids.prefix(2) { _ = try await backend.append([id]) }
        try await backend.reset()
    }
}
