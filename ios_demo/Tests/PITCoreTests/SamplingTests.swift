import XCTest

@testable import PITCore

final class SamplingTests: XCTestCase {
    func testPhiloxVectors() throws {
        let vectors = try Vectors.read("philox.json")
        for vector in try vectors.list("philox") {
            let counter = try vector.field("counter").integers().map(UInt32.init)
            let key = try vector.field("key").integers().map(UInt32.init)
            let words = Philox.words(counter: (counter[0], counter[1], counter[2], counter[3]), key: (key[0], key[1]))
            XCTAssertEqual([words.0, words.1, words.2, words.3].map(Int.init), try vector.field("expected").integers())
        }
        for vector in try vectors.list("uniform") {
            let seed = try XCTUnwrap(UInt64(vector.text("seed")))
            let step = try XCTUnwrap(UInt64(vector.text("step")))
            XCTAssertEqual(Philox.uniform(seed: seed, step: step), try vector.number("expected"))
        }
    }

    func testSamplingVectors() throws {
        let cases = try Vectors.read("sampling.json").list("cases")
        XCTAssertGreaterThan(cases.count, 20)
        for vector in cases {
            let name = try vector.text("name")
            let logits = try vector.list("logits").map { try $0.anyDouble() }
            let options = try vector.field("options").samplingOptions()
            let previous = Set(try vector.field("previous_ids").integers())
            let expected = try vector.field("expected")
            let step = try XCTUnwrap(UInt64(vector.text("step")))
            let found = try Sampling.probabilities(logits, options, previous: previous)
            XCTAssertEqual(found.ids, try expected.field("ids").integers(), name)
            for (mine, theirs) in zip(found.probabilities, try expected.list("probabilities")) {
                XCTAssertEqual(mine, try theirs.anyDouble(), accuracy: 1e-9, name)
            }
            let drawn = try expected.whole("drawn")
            XCTAssertEqual(try Sampling.draw(logits, options, step: step, previous: previous), drawn, name)
            // All finite logits of the vectors are exact as float32.
            XCTAssertEqual(try Sampling.draw(logits.map(Float.init), options, step: step, previous: previous), drawn, name)
        }
    }

    func testLogitsThatCannotBeDrawnFrom() throws {
        let hot = try SamplingOptions(temperature: 1)
        for vector in try Vectors.read("sampling.json").list("errors") {
            let logits = try vector.list("logits").map { try $0.anyDouble() }
            for options in [SamplingOptions.greedy, hot] {
                guard case .input? = thrown({ _ = try Sampling.draw(logits.map(Float.init), options, step: 0) }) else {
                    return XCTFail(try vector.text("name"))
                }
            }
        }
    }

    func testOptionsOutsideTheirRange() {
        let wrong: [(String, () throws -> SamplingOptions)] = [
            ("temperature", { try SamplingOptions(temperature: -1) }),
            ("temperature", { try SamplingOptions(temperature: .infinity) }),
            ("top_k", { try SamplingOptions(topK: -1) }),
            ("top_p", { try SamplingOptions(topP: 1.5) }),
            ("min_p", { try SamplingOptions(minP: .nan) }),
            ("repetition_penalty", { try SamplingOptions(repetitionPenalty: 0) }),
        ]
        for (name, make) in wrong {
            let sentence = thrown { _ = try make() }?.sentence ?? ""
            XCTAssertTrue(sentence.hasPrefix(name), sentence)
        }
    }

    func testGenerationConfig() throws {
        func options(_ text: String) throws -> SamplingOptions {
            try SamplingOptions(generationConfig: try XCTUnwrap(JSONParser.parse(Data(text.utf8)).object), seed: 3)
        }
        XCTAssertEqual(try options("{}"), try SamplingOptions(seed: 3))
        XCTAssertEqual(try options(#"{"temperature": 0.6}"#), try SamplingOptions(seed: 3))
        XCTAssertEqual(
            try options(#"{"do_sample": true, "top_k": 50, "top_p": 0.9, "min_p": null, "repetition_penalty": 1.1}"#),
            try SamplingOptions(temperature: 1, topK: 50, topP: 0.9, repetitionPenalty: 1.1, seed: 3))
        XCTAssertNotNil(thrown { _ = try options(#"{"do_sample": true, "temperature": "hot"}"#) })
    }

    /// Of a large vocabulary only the largest few are sorted where the rest cannot matter; what comes out is what the
    /// definition gives with everything sorted.
    func testLargeVocabulary() throws {
        let logits = (0..<6_000).map { Double(($0 * 7919) % 5003) / 250 }
        let order = logits.indices.sorted { logits[$0] == logits[$1] ? $0 < $1 : logits[$0] > logits[$1] }
        for (temperature, topK, topP) in [(0.7, 0, 1.0), (0.7, 40, 1.0), (1.5, 3000, 0.9), (1.0, 0, 0.9), (9.0, 0, 0.999), (9.0, 0, 1.0)] {
            var kept = order
            if topK > 0 { kept = kept.filter { logits[$0] >= logits[order[topK - 1]] } }
            let weights = kept.map { exp((logits[$0] - logits[order[0]]) / temperature) }
            let total = weights.reduce(0, +)
            var (count, removed) = (kept.count, 0.0)
            while topP < 1, removed + weights[count - 1] / total <= 1 - topP {
                removed += weights[count - 1] / total
                count -= 1
            }
            for seed in UInt64(0)..<3 {
                let options = try SamplingOptions(temperature: temperature, topK: topK, topP: topP, seed: seed)
                if seed == 0 {
                    XCTAssertEqual(try Sampling.probabilities(logits, options).ids, Array(kept.prefix(count)))
                }
                let left = weights.prefix(count)
                let target = Philox.uniform(seed: seed, step: 3) * left.reduce(0, +)
                var sum = 0.0
                let place = left.firstIndex { weight in
                    sum += weight
                    return sum > target
                }
                XCTAssertEqual(try Sampling.draw(logits, options, step: 3), kept[try XCTUnwrap(place)])
            }
        }
    }
}
