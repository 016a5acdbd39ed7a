import XCTest

@testable import PITCore

final class ChatSessionTests: XCTestCase {
    private func parts() throws -> (Tokenizer, ChatTemplate) {
        let source = try XCTUnwrap(Vectors.read("templates.json")["templates"]?["markers"]?.string)
        let file = Vectors.folder.appendingPathComponent("tokenizers/byte_level.json")
        return (try Tokenizer(try Vectors.json(file)), try ChatTemplate(source))
    }

    /// The second turn runs only what the cache lacks. Where the answer's text has other ids than those that were
    /// drawn, the cache is taken back to where they part; a runtime that cannot do so begins anew.
    func testTwoTurns() async throws {
        let (tokenizer, template) = try parts()
        let end = try XCTUnwrap(tokenizer.encode("<|end|>").first)
        let answer = "the token"
        let letters = answer.flatMap { tokenizer.encode(String($0)) }
        XCTAssertNotEqual(letters, tokenizer.encode(answer))
        for (drawn, canRewind, startsAnew) in [
            (tokenizer.encode(answer), false, false), (letters, true, false), (letters, false, true),
        ] {
            let draws = drawn + [end] + tokenizer.encode("No") + [end]
            let backend = ScriptedBackend(contextLength: 400, vocabSize: 432, draws: draws, canRewind: canRewind)
            let session = ChatSession(backend, tokenizer, template, stopIds: [end])
            let events = Collected<ChatEvent>()
            _ = try await session.answer("Is it?", maxNewTokens: 20, options: .greedy) { await events.add($0) }
            let first = await session.messages
            XCTAssertEqual(first, [ChatMessage(.user, "Is it?"), ChatMessage(.assistant, answer)])
            let made = try await session.answer("Sure?", maxNewTokens: 20, options: .greedy) { await events.add($0) }
            XCTAssertEqual(made.finishReason, .stop)
            let messages = await session.messages
            XCTAssertEqual(messages.map(\.content), ["Is it?", answer, "Sure?", "No"])
            let whole = tokenizer.encode(try template.render(Array(messages.prefix(3))))
            let before = tokenizer.encode(try template.render(Array(messages.prefix(1))))
            let prompts = await backend.ran.filter { $0.count > 1 }
            XCTAssertEqual(prompts.first, before)
            let shared = zip(before + drawn, whole).prefix { $0 == $1 }.count
            XCTAssertEqual(prompts.last, Array(whole.dropFirst(startsAnew ? 0 : shared)))
            let texts = await events.items.compactMap { event -> String? in
                if case .text(let text) = event { return text } else { return nil }
            }
            XCTAssertEqual(texts.joined(), answer + "No")
        }
    }

    /// A turn past the limit is an error before anything runs, and the conversation stays.
    func testContextFull() async throws {
        let (tokenizer, template) = try parts()
        let end = try XCTUnwrap(tokenizer.encode("<|end|>").first)
        let length = tokenizer.encode(try template.render([ChatMessage(.user, "Hi")])).count
        let backend = ScriptedBackend(contextLength: length + 10, vocabSize: 432, draws: [70, end, 71, end])
        let session = ChatSession(backend, tokenizer, template, stopIds: [end])
        _ = try await session.answer("Hi", maxNewTokens: 5, options: .greedy) { _ in }
        let before = await session.messages
        let runs = await backend.runs
        let error = await thrown {
            _ = try await session.answer("And what follows from this?", maxNewTokens: 5, options: .greedy) { _ in }
        }
        guard case .contextFull(0, _, length + 10)? = error else { return XCTFail(String(describing: error)) }
        let (after, runsAfter) = (await session.messages, await backend.runs)
        XCTAssertEqual(after, before)
        XCTAssertEqual(runsAfter, runs)
        try await session.clear()
        let (empty, position) = (await session.messages, await backend.position())
        XCTAssertEqual(empty, [])
        XCTAssertEqual(position, 0)
    }

    func testSystemMessage() async throws {
        let (tokenizer, template) = try parts()
        let end = try XCTUnwrap(tokenizer.encode("<|end|>").first)
        let backend = ScriptedBackend(contextLength: 400, vocabSize: 432, draws: [end])
        let session = ChatSession(backend, tokenizer, template, stopIds: [end], system: "Be brief.")
        _ = try await session.answer("Hi", maxNewTokens: 5, options: .greedy) { _ in }
        let ran = await backend.ran
        XCTAssertEqual(
            ran.first, tokenizer.encode(try template.render([ChatMessage(.system, "Be brief."), ChatMessage(.user, "Hi")])))
        let messages = await session.messages
        XCTAssertEqual(messages.map(\.role), [.system, .user, .assistant])
    }
}
