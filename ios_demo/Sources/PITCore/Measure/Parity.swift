import Foundation

/// One position of a runtime against the record.
public struct PositionError: Sendable, Equatable {
    /// KL divergence in nats, exact over the recorded largest logits; the rest of the vocabulary is one event.
    public let kl: Double
    /// Largest absolute error over the recorded logits.
    public let maxAbs: Double
    /// Whether the largest logit is the reference's, ties aside.
    public let top1: Bool
}

/// The result of one comparison, with the names of `verify --json`.
public struct ParityReport: Sendable {
    public let bundle: String
    public let runtime: String
    public let precision: String
    public let gate: Gate
    public let positions: [PositionError]
    public let promptLengths: [Int]
    /// Largest difference between one pass and step by step in the runtime itself.
    public let onePassAgainstSteps: Double
    public let greedyTokens: Int
    /// Leading greedy tokens that agree, ties aside.
    public let greedyEqual: Int

    public var meanKL: Double { positions.reduce(0) { $0 + $1.kl } / Double(positions.count) }
    public var worstKL: Double { largest(positions.map(\.kl)) }
    public var maxAbs: Double { largest(positions.map(\.maxAbs)) }
    public var top1: Double { Double(positions.count { $0.top1 }) / Double(positions.count) }
    public var passed: Bool { failures.isEmpty }

    /// A sentence part for each figure that is out of tolerance.
    public var failures: [String] {
        var found: [String] = []
        if !positions.allSatisfy({ $0.kl.isFinite && $0.maxAbs.isFinite }) { found.append("some logits are not finite") }
        if let limit = gate.maxAbs {
            if !(maxAbs <= limit) { found.append("max abs logit error \(short(maxAbs)) is above \(short(limit))") }
            if !(onePassAgainstSteps <= limit) {
                found.append("one pass and step by step differ by \(short(onePassAgainstSteps)), above \(short(limit))")
            }
        }
        if !(meanKL <= gate.meanKL) { found.append("mean KL \(short(meanKL)) is above \(short(gate.meanKL))") }
        if !(top1 >= gate.top1) {
            found.append("top-1 agreement \(short(100 * top1)) % is below \(short(100 * gate.top1)) %")
        }
        if gate.greedy, greedyEqual < greedyTokens {
            found.append("greedy decoding differs at token \(greedyEqual) of \(greedyTokens)")
        }
        return found
    }

    /// The object that `verify --json` writes, apart from what an app does not measure, which is null or empty.
    public var json: JSONValue {
        func numbers(_ values: [Double]) -> JSONValue { .array(values.map { $0.isFinite ? .number($0) : .null }) }
        func number(_ value: Double) -> JSONValue { value.isFinite ? .number(value) : .null }
        return .object(
            JSONObject([
                ("bundle", .string(bundle)), ("runtime", .string(runtime)), ("precision", .string(precision)),
                ("reference", .string("golden record")), ("passed", .bool(passed)),
                ("failures", .array(failures.map(JSONValue.string))), ("notes", .array([])),
                ("positions", .integer(positions.count)), ("max_abs_logit_error", number(maxAbs)),
                ("mean_kl", number(meanKL)), ("worst_kl", number(worstKL)), ("top1", number(top1)),
                ("one_pass_against_steps_max_abs", number(onePassAgainstSteps)),
                ("greedy_tokens", .integer(greedyTokens)), ("greedy_equal", .integer(greedyEqual)),
                (
                    "gate",
                    .object(
                        JSONObject([
                            ("max_abs", gate.maxAbs.map(JSONValue.number) ?? .null), ("mean_kl", .number(gate.meanKL)),
                            ("top1", .number(gate.top1)), ("greedy", .bool(gate.greedy)), ("layer", .number(gate.layer)),
                        ]))
                ),
                ("layers", .array([])), ("first_diverging_layer", .null), ("load_rss_bytes", .null), ("total_bytes", .null),
                (
                    "per_position",
                    .object(
                        JSONObject([
                            ("kl", numbers(positions.map(\.kl))), ("max_abs", numbers(positions.map(\.maxAbs))),
                            ("top1", .array(positions.map { .integer($0.top1 ? 1 : 0) })),
                        ]))
                ),
                ("prompt_lengths", .array(promptLengths.map(JSONValue.integer))),
            ]))
    }
}

public enum Parity {
    /// One position's logits against the record.
    public static func compare(_ golden: GoldenRecord, position: Int, _ logits: [Float]) -> PositionError {
        let ids = golden.topIds[position]
        let reference = golden.topLogits[position]
        let total = logSumExp(logits)
        var kl = 0.0
        var (restP, restQ) = (1.0, 1.0)
        for (id, logit) in zip(ids, reference) {
            let logP = Double(logit) - golden.logSumExp[position]
            let logQ = Double(logits[id]) - total
            kl += exp(logP) * (logP - logQ)
            restP -= exp(logP)
            restQ -= exp(logQ)
        }
        restP = max(restP, 0)
        if restP > 1e-12 { kl += restP * log(restP / larger(restQ, 1e-300)) }
        let recorded = zip(ids, reference).map { ($0, $1) } + zip(golden.sampledIds, golden.sampledLogits[position]).map { ($0, $1) }
        let errors = recorded.map { Double((logits[$0.0] - $0.1).magnitude) }
        let best = largestPlace(logits)
        let isTied = ids.firstIndex(of: best).map { Double(reference[0] - reference[$0]) <= Gate.tie } ?? false
        return PositionError(kl: kl.isNaN ? kl : max(kl, 0), maxAbs: largest(errors), top1: best == ids[0] || isTied)
    }

    /// Run every prompt of the record through a backend, token by token and in one pass, and its greedy continuation.
    ///
    /// `progress` gets the share that is done and may throw to end the work.
    public static func verify(
        _ backend: some DecoderBackend, _ golden: GoldenRecord, manifest: Manifest, bundle: String,
        progress: @Sendable (Double) async throws -> Void = { _ in }
    ) async throws -> ParityReport {
        try await verify(
            backend, golden, runtime: manifest.runtime, weights: manifest.precision.weights,
            tables: manifest.precision.tables, endIds: manifest.endIds, bundle: bundle, progress: progress)
    }

    static func verify(
        _ backend: some DecoderBackend, _ golden: GoldenRecord, runtime: String, weights: String, tables: String,
        endIds: [Int], bundle: String, progress: @Sendable (Double) async throws -> Void = { _ in }
    ) async throws -> ParityReport {
        let longest = golden.prompts.map(\.ids.count).max() ?? 0
        guard longest <= backend.contextLength, golden.vocabSize == backend.vocabSize else {
            throw PITError.input(
                "The golden record (longest prompt \(longest), vocabulary \(golden.vocabSize)) does not belong to this "
                    + "artifact (context \(backend.contextLength), vocabulary \(backend.vocabSize)).")
        }
        var rows: [PositionError] = []
        var onePass = 0.0
        for prompt in golden.prompts {
            try await backend.reset()
            let last = try await backend.append(prompt.ids)
            try await backend.reset()
            var logits = last
            for id in prompt.ids {
                logits = try await backend.append([id])
                rows.append(compare(golden, position: rows.count, logits))
                try await progress(Double(rows.count) / Double(golden.positions))
            }
            // The last position is judged as the worse of one pass and step by step.
            rows[rows.count - 1] = worse(compare(golden, position: rows.count - 1, last), rows[rows.count - 1])
            let length = golden.tokenizerLength
            onePass = larger(onePass, largest(zip(last.prefix(length), logits.prefix(length)).map { Double(($0 - $1).magnitude) }))
        }
        let found = try await greedy(backend, golden, endIds)
        return ParityReport(
            bundle: bundle, runtime: backend.runtimeName, precision: Gate.coarsest(weights, tables),
            gate: try Gate.of(runtime: runtime, weights: weights, tables: tables), positions: rows,
            promptLengths: golden.prompts.map(\.ids.count), onePassAgainstSteps: onePass,
            greedyTokens: golden.greedyIds.count, greedyEqual: equalTokens(found, golden))
    }

    private static func greedy(_ backend: some DecoderBackend, _ golden: GoldenRecord, _ endIds: [Int]) async throws -> [Int] {
        let prompt = golden.prompts[golden.greedyPrompt].ids
        try await backend.reset()
        var logits = try await backend.append(prompt)
        var found: [Int] = []
        while found.count < min(golden.greedyIds.count, backend.contextLength - prompt.count + 1) {
            let id = largestPlace(logits)
            found.append(id)
            if endIds.contains(id) { break }
            if await backend.position() >= backend.contextLength { break }
            logits = try await backend.append([id])
        }
        try await backend.reset()
        return found
    }

    private static func equalTokens(_ found: [Int], _ golden: GoldenRecord) -> Int {
        guard let number = zip(found, golden.greedyIds).enumerated().first(where: { $1.0 != $1.1 })?.offset else {
            return min(found.count, golden.greedyIds.count)
        }
        // After a tie the two continuations are different texts; what follows cannot be compared.
        return golden.greedyMargins[number] <= Gate.tie ? golden.greedyIds.count : number
    }

    /// The one without top-1; of two alike the one with the larger KL, then with the larger error.
    private static func worse(_ a: PositionError, _ b: PositionError) -> PositionError {
        if a.top1 != b.top1 { return a.top1 ? b : a }
        if a.kl != b.kl { return a.kl > b.kl ? a : b }
        return a.maxAbs > b.maxAbs ? a : b
    }

    static func logSumExp(_ logits: [Float]) -> Double {
        let most = Double(largestFloat(logits))
        return most + log(logits.reduce(0) { $0 + exp(Double($1) - most) })
    }

    private static func largestFloat(_ values: [Float]) -> Float {
        values.reduce(-.infinity) { $1.isNaN || $0.isNaN ? .nan : max($0, $1) }
    }

    /// The first place of the largest value; of a NaN where there is one, as numpy has it.
    private static func largestPlace(_ values: [Float]) -> Int {
        var best = 0
        for (place, value) in values.enumerated() {
            if value.isNaN { return place }
            if value > values[best] { best = place }
        }
        return best
    }
}

/// The larger; NaN where either is.
private func larger(_ a: Double, _ b: Double) -> Double { a.isNaN || b.isNaN ? .nan : max(a, b) }

private func largest(_ values: [Double]) -> Double { values.reduce(0, larger) }

/// Three digits, for sentences.
private func short(_ value: Double) -> String { String(format: "%.3g", value) }
