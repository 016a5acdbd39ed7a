import XCTest

@testable import PITCore

final class TokenizerTests: XCTestCase {
    /// The tokenizers of the vectors, against Hugging Face's ids, and of $PIT_TOKENS where it names such a file.
    func testVectors() throws {
        try check(try Vectors.read("tokens.json"), least: 8)
        if let file = ProcessInfo.processInfo.environment["PIT_TOKENS"] {
            try check(try Vectors.json(URL(fileURLWithPath: file)), least: 1)
        }
    }

    private func check(_ vectors: JSONObject, least: Int) throws {
        let texts = try vectors.list("texts").map { try XCTUnwrap($0.string) }
        let surrogates = try vectors.list("surrogates").map { entry in
            String(decoding: try entry.field("units").integers().map { UInt16($0) }, as: UTF16.self)
        }
        let tokenizers = try vectors.list("tokenizers")
        XCTAssertGreaterThanOrEqual(tokenizers.count, least)
        for vector in tokenizers {
            let path = try vector.text("file")
            let file = path.hasPrefix("/") ? URL(fileURLWithPath: path) : Vectors.folder.appendingPathComponent(path)
            let tokenizer = try Tokenizer(try Vectors.json(file))
            let name = try vector.text("name")
            var wrong = 0
            for (text, (expected, decoded)) in zip(texts, zip(try vector.list("ids"), try vector.list("decoded"))) {
                let ids = tokenizer.encode(text)
                if ids != (try expected.integers()) {
                    wrong += 1
                    if wrong < 4 { XCTFail("\(name): \(text.debugDescription) is \(ids), not \(try expected.integers())") }
                }
                XCTAssertEqual(
                    ExactString(tokenizer.decode(try expected.integers())), ExactString(decoded.string ?? text), name)
            }
            XCTAssertEqual(wrong, 0, "\(name): \(wrong) of \(texts.count) texts")
            for (text, expected) in zip(surrogates, try vector.list("surrogate_ids")) {
                XCTAssertEqual(tokenizer.encode(text), try expected.integers(), "\(name): \(text.debugDescription)")
            }
            for prompt in try vector.list("prompts") {
                XCTAssertEqual(
                    tokenizer.encode(try prompt.text("text"), addSpecialTokens: true), try prompt.field("ids").integers(), name)
            }
            for entry in try vector.list("streams") {
                var stream = TextStream(tokenizer)
                let pieces = try entry.field("ids").integers().map { stream.push($0) } + [stream.finish()]
                XCTAssertEqual(
                    pieces.map(ExactString.init), try entry.field("pieces").texts().map(ExactString.init), name)
            }
        }
    }

    private func tokenizer(_ text: String) throws -> Tokenizer {
        try Tokenizer(try XCTUnwrap(JSONParser.parse(Data(text.utf8)).object))
    }

    /// What this reader does not know is an error that names it, and never another split.
    func testUnknownKinds() throws {
        let model = #""model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}"#
        let wrong = [
            (#"{"model": {"type": "Unigram", "vocab": []}}"#, "Unigram"),
            (#"{\#(model), "normalizer": {"type": "Precompiled"}}"#, "Precompiled"),
            (#"{\#(model), "pre_tokenizer": {"type": "BertPreTokenizer"}}"#, "BertPreTokenizer"),
            (#"{\#(model), "decoder": {"type": "WordPiece"}}"#, "WordPiece"),
            (#"{\#(model), "post_processor": {"type": "BertProcessing"}}"#, "BertProcessing"),
            (
                #"{\#(model), "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated"}}"#,
                "(("
            ),
            (#"{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}"#, "merges.0"),
        ]
        for (text, named) in wrong {
            guard case .tokenizer(let sentence)? = thrown({ _ = try tokenizer(text) }) else { return XCTFail(named) }
            XCTAssertTrue(sentence.contains(named), sentence)
        }
    }

    /// Composed and decomposed letters are two tokens, though Swift's strings call them equal.
    func testCanonicallyEqualTokens() throws {
        let found = try tokenizer(
            #"{"model": {"type": "BPE", "vocab": {"\u00e9": 0, "e": 1, "\u0301": 2, "e\u0301": 3}, "merges": [["e", "\u0301"]]}}"#)
        XCTAssertEqual(found.encode("\u{e9}"), [0])
        XCTAssertEqual(found.encode("e\u{301}"), [3])
    }

    /// The pattern of Qwen and Llama has a lookahead; white space at an end of line is where engines differ.
    func testLookaheadInThePattern() throws {
        let pattern = try RegexPattern("\\s+(?!\\S)|\\s+|\\S+")
        XCTAssertEqual(pattern.cut("a  b\u{85}\u{0B} \n c").map(\.text), ["a", " ", " ", "b", "\u{85}\u{0B} \n", " ", "c"])
    }

    func testTokenizerMismatch() throws {
        let manifest = try Manifest.parse(
            try Data(contentsOf: Vectors.folder.appendingPathComponent("manifests/good_onnx.json")))
        let small = try Tokenizer(try Vectors.json(Vectors.folder.appendingPathComponent("tokenizers/byte_level.json")))
        guard case .bundle(.tokenizerMismatch, let sentence)? = thrown({ try small.check(manifest) }) else {
            return XCTFail("no mismatch")
        }
        XCTAssertTrue(sentence.contains("and the manifest says"), sentence)
    }

    /// Merging costs about the length, and not its square: four times the letters of one word, well below 16 times.
    func testLongWord() throws {
        let long = try Tokenizer(try Vectors.json(Vectors.folder.appendingPathComponent("tokenizers/metaspace.json")))
        func seconds(_ count: Int) -> Double {
            let text = String(repeating: "the token ", count: count)
            return ContinuousClock().measure { XCTAssertEqual(long.decode(long.encode(text)), text) }.seconds
        }
        _ = seconds(10)
        let short = (0..<3).map { _ in seconds(250) }.min() ?? 0
        let four = (0..<3).map { _ in seconds(1000) }.min() ?? 0
        XCTAssertLessThan(four, 10 * short)
    }
}
