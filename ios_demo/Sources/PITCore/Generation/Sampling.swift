import Foundation

/// Sampling as Python, Kotlin, Swift and JavaScript share it: docs/sampling.md is the whole definition, and the
/// numbers below are its steps.
public enum Sampling {
    /// How many of the largest scores are sorted where the rest cannot matter; a choice of speed, not of meaning.
    private static let head = 1024

    /// An id that may be drawn, with its score less the largest one.
    private struct Candidate {
        let id: Int
        let score: Double
    }

    /// Draw one id from the logits of one position.
    ///
    /// `step` is the position in the sequence that the drawn token will take. `previous` are the ids of the prompt
    /// and of what was generated, for the repetition penalty. Throws `PITError.input` where a logit is NaN or
    /// infinite, or all are minus infinity.
    public static func draw(
        _ logits: [Float], _ options: SamplingOptions, step: UInt64, previous: Set<Int> = []
    ) throws -> Int {
        if options.temperature == 0 && options.repetitionPenalty == 1 { return try greedy(logits) }
        return try draw(logits.map(Double.init), options, step: step, previous: previous)
    }

    static func draw(
        _ logits: [Double], _ options: SamplingOptions, step: UInt64, previous: Set<Int> = []
    ) throws -> Int {
        let kept = try filtered(logits, options, previous)
        let u = Philox.uniform(seed: options.seed, step: step)
        if kept.count > 4 * head {
            // Sorting a whole vocabulary costs as much as a small model's step; nearly every draw falls among the
            // largest few.
            let target = u * kept.reduce(0) { $0 + exp($1.score) }
            if let id = firstAbove(target, inOrder(largest(kept))) { return id }
        }
        let ordered = inOrder(kept)
        let total = ordered.reduce(0) { $0 + exp($1.score) }
        // 9. The last running sum is above u times itself, since u is below 1.
        return firstAbove(u * total, ordered) ?? ordered[ordered.count - 1].id
    }

    /// The ids that may be drawn, most probable first (equal ones by id), and their probabilities.
    static func probabilities(
        _ logits: [Double], _ options: SamplingOptions, previous: Set<Int> = []
    ) throws -> (ids: [Int], probabilities: [Double]) {
        let ordered = inOrder(try filtered(logits, options, previous))
        let weights = ordered.map { exp($0.score) }
        let total = weights.reduce(0, +)
        return (ordered.map(\.id), weights.map { $0 / total })
    }

    /// The lowest id with the largest logit.
    static func greedy(_ logits: [Float]) throws -> Int {
        var best = 0
        var largest = -Float.infinity
        for (id, logit) in logits.enumerated() {
            if logit > largest { (best, largest) = (id, logit) }
            if logit.isNaN || logit == .infinity { throw notFinite(logits.map(Double.init)) }
        }
        if largest == -.infinity { throw notFinite(logits.map(Double.init)) }
        return best
    }

    /// The first id whose running sum of weights is above `target`.
    private static func firstAbove(_ target: Double, _ ordered: [Candidate]) -> Int? {
        var sum = 0.0
        return ordered.first { candidate in
            sum += exp(candidate.score)
            return sum > target
        }?.id
    }

    /// The candidates that are left, by id.
    private static func filtered(
        _ logits: [Double], _ options: SamplingOptions, _ previous: Set<Int>
    ) throws -> [Candidate] {
        var scores = logits
        // 1. Repetition penalty.
        if options.repetitionPenalty != 1 {
            for id in previous {
                guard scores.indices.contains(id) else {
                    throw PITError.input("The previous id \(id) is outside the vocabulary of \(scores.count) rows.")
                }
                let score = scores[id]
                scores[id] = score < 0 ? score * options.repetitionPenalty : score / options.repetitionPenalty
            }
        }
        // 2. Check.
        guard let largest = scores.max(), largest.isFinite, !scores.contains(where: { $0.isNaN || $0 == .infinity })
        else { throw notFinite(scores) }
        // 3. Greedy.
        if options.temperature == 0 {
            return [Candidate(id: scores.firstIndex(of: largest) ?? 0, score: 0)]
        }
        // 4. Temperature.
        var candidates: [Candidate] = []
        for (id, score) in scores.enumerated() where score > -.infinity {
            candidates.append(Candidate(id: id, score: (score - largest) / options.temperature))
        }
        return minP(topP(topK(candidates, options), options), options)
    }

    /// 5. The order of drawing: largest score first, equal ones by id.
    private static func inOrder(_ candidates: [Candidate]) -> [Candidate] {
        candidates.sorted { $0.score == $1.score ? $0.id < $1.id : $0.score > $1.score }
    }

    /// 6. Equal scores at the border all stay.
    private static func topK(_ candidates: [Candidate], _ options: SamplingOptions) -> [Candidate] {
        guard options.topK > 0, options.topK < candidates.count else { return candidates }
        let border = nthLargest(candidates, options.topK)
        return candidates.filter { $0.score >= border }
    }

    /// 7. Remove from the end of the order while the sum of what is removed is at most 1 - p.
    private static func topP(_ candidates: [Candidate], _ options: SamplingOptions) -> [Candidate] {
        guard options.topP < 1 else { return candidates }
        let total = candidates.reduce(0) { $0 + exp($1.score) }
        var considered = candidates
        var removed = 0.0
        if candidates.count > 4 * head {
            // Where everything below the largest few surely goes, only those few need an order.
            let kept = largest(candidates)
            let below = (total - kept.reduce(0) { $0 + exp($1.score) }) / total
            if below < 1 - options.topP - 1e-9 { (considered, removed) = (kept, below) }
        }
        considered = inOrder(considered)
        while considered.count > 1, let last = considered.last {
            removed += exp(last.score) / total
            if removed > 1 - options.topP { break }
            considered.removeLast()
        }
        return considered.sorted { $0.id < $1.id }
    }

    /// 8. The largest score is 0, so that exp(score) is the ratio to it.
    private static func minP(_ candidates: [Candidate], _ options: SamplingOptions) -> [Candidate] {
        options.minP > 0 ? candidates.filter { exp($0.score) >= options.minP } : candidates
    }

    /// The candidates with the `head` largest scores, and those equal to the least of them.
    private static func largest(_ candidates: [Candidate]) -> [Candidate] {
        let border = nthLargest(candidates, head)
        return candidates.filter { $0.score >= border }
    }

    /// The `n`th largest score, by a heap of the `n` largest with the least of them in front.
    private static func nthLargest(_ candidates: [Candidate], _ n: Int) -> Double {
        var heap = Heap<Double>(by: <)
        for candidate in candidates {
            if heap.count < n {
                heap.push(candidate.score)
            } else if let least = heap.first, candidate.score > least {
                _ = heap.pop()
                heap.push(candidate.score)
            }
        }
        return heap.first ?? -.infinity
    }

    private static func notFinite(_ scores: [Double]) -> PITError {
        guard let wrong = scores.firstIndex(where: { $0.isNaN || $0 == .infinity }) else {
            return .input("All \(scores.count) logits are -inf, so there is no token to draw.")
        }
        let count = scores.count { $0.isNaN || $0 == .infinity }
        return .input(
            "\(count) of \(scores.count) logits are not finite, first at token id \(wrong) (\(scores[wrong])), so no "
                + "token can be drawn; run 'pit-deploy verify' on the artifact.")
    }
}
