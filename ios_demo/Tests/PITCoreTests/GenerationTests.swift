import XCTest

@testable import PITCore

/// Counts what a callback got, from any thread.
actor Counter {
    private(set) var count = 0
    func add() -> Int {
        count += 1
        return count
    }
}

actor Collected<Element: Sendable> {
    private(set) var items: [Element] = []
    func add(_ item: Element) { items.append(item) }
}

final class GenerationTests: XCTestCase {
    func testStopVectors() async throws {
        for vector in try Vectors.read("stop.json").list("loops") {
            let name = vector["name"]?.string ?? jsonText(vector)
            let backend = ScriptedBackend(
                contextLength: try vector.whole("context_length"), position: try vector.whole("position"),
                draws: try vector.field("draws").integers())
            let prompt = [Int](repeating: 1, count: try vector.whole("prompt_tokens"))
            let request = GenerationRequest(
                maxNewTokens: try vector.whole("max_new_tokens"), stopIds: try vector.field("stop_ids").integers())
            let cancelAfter = try vector.field("cancel_after").integer
            let counter = Counter()
            let run = { @Sendable in
                try await generate(prompt, with: backend, request) { _ in
                    let count = await counter.add()
                    return cancelAfter.map { count < $0 } ?? true
                }
            }
            let expected = try vector.field("expected")
            if let word = expected["error"]?.string {
                let error = await thrown { _ = try await run() }
                switch (word, error) {
                case ("context_full", .contextFull?), ("input", .input?): break
                default: XCTFail("\(name): \(String(describing: error))")
                }
                let runs = await backend.runs
                XCTAssertEqual(runs, 0, name)
                continue
            }
            let found = try await run()
            XCTAssertEqual(found.ids, try expected.field("ids").integers(), name)
            XCTAssertEqual(found.finishReason.rawValue, try expected.text("finish_reason"), name)
            XCTAssertEqual(found.stopId, try expected.field("stop_id").integer, name)
            XCTAssertEqual(found.pendingIds, try expected.field("pending_ids").integers(), name)
            let (runs, position) = (await backend.runs, await backend.position())
            XCTAssertEqual(runs, try expected.whole("runs"), name)
            XCTAssertEqual(position, try expected.whole("position"), name)
        }
    }

    /// Python's generations over recorded logits: ids, text as it streams, and how each ended.
    func testRecordedGenerations() async throws {
        let vectors = try Vectors.read("generation.json")
        let file = try XCTUnwrap(vectors["tokenizer"]?.string)
        let tokenizer = try Tokenizer(try Vectors.json(Vectors.folder.appendingPathComponent(file)))
        let name = try XCTUnwrap(vectors["template"]?.string)
        let source = try XCTUnwrap(Vectors.read("templates.json")["templates"]?[name]?.string)
        let template = try ChatTemplate(source)
        for vector in try vectors.list("cases") {
            let name = try vector.text("name")
            let backend = try RecordedBackend(
                try vector.list("runs"), contextLength: try vector.whole("context_length"),
                vocabSize: try vector.whole("vocab_size"))
            var request = GenerationRequest(
                maxNewTokens: try vector.whole("max_new_tokens"),
                options: try vector.field("options").samplingOptions(), stopIds: try vector.field("stop_ids").integers())
            var pending: [Int] = []
            for turn in try vector.list("turns") {
                let text = try turn.text("text")
                if let messages = vector["messages"]?.array { XCTAssertEqual(try template.render(messages), text, name) }
                let prompt = pending + tokenizer.encode(text)
                XCTAssertEqual(prompt, try turn.field("prompt_ids").integers(), name)
                let stream = StreamedText(tokenizer)
                let made = try await generate(prompt, with: backend, request) { id in
                    await stream.push(id)
                    return true
                }
                let expected = try turn.field("expected")
                XCTAssertEqual(made.ids, try expected.field("ids").integers(), name)
                XCTAssertEqual(made.finishReason.rawValue, try expected.text("finish_reason"), name)
                XCTAssertEqual(made.stopId, try expected.field("stop_id").integer, name)
                XCTAssertEqual(made.pendingIds, try expected.field("pending_ids").integers(), name)
                let pieces = await stream.finished()
                XCTAssertEqual(pieces.map(ExactString.init), try expected.field("pieces").texts().map(ExactString.init), name)
                let position = await backend.position()
                XCTAssertEqual(position, try expected.whole("position"), name)
                request.history.formUnion(prompt + made.ids)
                pending = made.pendingIds
            }
        }
    }

    func testCancelledTaskKeepsWhatWasGenerated() async throws {
        let backend = ScriptedBackend(contextLength: 1000, draws: [Int](repeating: 5, count: 1000))
        let counter = Counter()
        let task = Task {
            try await generate([1], with: backend, GenerationRequest(maxNewTokens: 900, stopIds: [2])) { _ in
                if await counter.add() == 3 { withUnsafeCurrentTask { $0?.cancel() } }
                return true
            }
        }
        let made = try await task.value
        XCTAssertEqual(made.finishReason, .cancelled)
        XCTAssertEqual(made.ids, [5, 5, 5])
    }

    func testAnyOfTheStopIdsEnds() async throws {
        for stop in [1, 106 % 32] {
            let backend = ScriptedBackend(contextLength: 50, draws: [7, 8, stop, 9])
            let made = try await generate([3], with: backend, GenerationRequest(maxNewTokens: 20, stopIds: [1, 106 % 32]))
            XCTAssertEqual(made.ids, [7, 8])
            XCTAssertEqual(made.stopId, stop)
        }
    }

    func testContextFullSentence() async throws {
        let backend = ScriptedBackend(contextLength: 16, draws: [])
        let error = await thrown {
            _ = try await generate([Int](repeating: 1, count: 20), with: backend, GenerationRequest(maxNewTokens: 5, stopIds: [2]))
        }
        XCTAssertEqual(error, .contextFull(used: 0, needed: 20, contextLength: 16))
        XCTAssertTrue(error?.sentence.hasPrefix("The context is full: 0 tokens are in the cache and 20 more") ?? false)
    }
}

private actor StreamedText {
    private var stream: TextStream
    private var pieces: [String] = []

    init(_ tokenizer: Tokenizer) { stream = TextStream(tokenizer) }

    func push(_ id: Int) { pieces.append(stream.push(id)) }

    func finished() -> [String] { pieces + [stream.finish()] }
}
