import Foundation

/// Sampling as Python, Kotlin, Swift and JavaScript share it: docs/sampling.md is the whole definition, and the
/// numbers below are its steps.
public enum Sampling {
    /// How many of the largest scores are sorted first; a choice of speed, not of meaning.
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
        let kept = try ordered(logits, options, previous)
        var sum = 0.0
        let sums = kept.map { candidate in
            sum += exp(candidate.score)
            return sum
        }
        // Step 9. The last running sum is above u times itself, since u is below 1.
        let target = Philox.uniform(seed: options.seed, step: step) * sum
        let place = sums.firstIndex { $0 > target } ?? kept.count - 1
        return kept[place].id
    }

    /// The ids that may be drawn, most probable first (equal ones by id), and their probabilities.
    static func probabilities(
        _ logits: [Double], _ options: SamplingOptions, previous: Set<Int> = []
    ) throws -> (ids: [Int], probabilities: [Double]) {
        let kept = try ordered(logits, options, previous)
        let weights = kept.map { exp($0.score) }
        let total = weights.reduce(0, +)
        return (kept.map(\.id), weights.map { $0 / total })
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

    private static func ordered(
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
        return minP(topP(topK(sorted(candidates, options), options), options), options)
    }

    /// 5. The order of drawing. Where `topK` leaves few of many, only those are sorted.
    private static func sorted(_ candidates: [Candidate], _ options: SamplingOptions) -> [Candidate] {
        var kept = candidates
        if options.topK > 0, options.topK <= head, candidates.count > 4 * head {
            let least = nthLargest(candidates, options.topK)
            kept = candidates.filter { $0.score >= least }
        }
        return kept.sorted { $0.score == $1.score ? $0.id < $1.id : $0.score > $1.score }
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

    /// 6. Equal ids at the border all stay.
    private static func topK(_ ordered: [Candidate], _ options: SamplingOptions) -> [Candidate] {
        guard options.topK > 0, options.topK < ordered.count else { return ordered }
        let border = ordered[options.topK - 1].score
        return Array(ordered.prefix { $0.score >= border })
    }

    /// 7. Remove from the end while the sum of what is removed is at most 1 - p.
    private static func topP(_ ordered: [Candidate], _ options: SamplingOptions) -> [Candidate] {
        guard options.topP < 1 else { return ordered }
        let weights = ordered.map { exp($0.score) }
        let total = weights.reduce(0, +)
        var count = ordered.count
        var removed = 0.0
        while count > 1 {
            removed += weights[count - 1] / total
            if removed > 1 - options.topP { break }
            count -= 1
        }
        return Array(ordered.prefix(count))
    }

    /// 8. The largest score is 0, so that exp(score) is the ratio to it.
    private static func minP(_ ordered: [Candidate], _ options: SamplingOptions) -> [Candidate] {
        options.minP > 0 ? ordered.filter { exp($0.score) >= options.minP } : ordered
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
