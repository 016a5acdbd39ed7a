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

    /// A large vocabulary takes the short way by `topK`; it gives what sorting everything gives.
    func testLargeVocabulary() throws {
        let logits = (0..<50_000).map { Double(($0 * 7919) % 5003) / 500 }
        for options in [
            try SamplingOptions(temperature: 0.7, topK: 40, seed: 9), try SamplingOptions(temperature: 1.5, topK: 3000, topP: 0.9),
        ] {
            let order = logits.indices.sorted { logits[$0] == logits[$1] ? $0 < $1 : logits[$0] > logits[$1] }
            let border = logits[order[options.topK - 1]]
            let kept = order.filter { logits[$0] >= border }
            let found = try Sampling.probabilities(logits, options)
            XCTAssertEqual(found.ids, Array(kept.prefix(found.ids.count)))
            XCTAssertEqual(options.topP == 1, found.ids.count == kept.count)
        }
    }
}
