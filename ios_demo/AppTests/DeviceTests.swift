import PITCore
import PITCoreML
import XCTest

/// Runs on a device (or a Mac), on the bundle in AppTests/TestBundle: correctness first, then speed.
final class DeviceTests: XCTestCase {
    private static let decodedTokens = 32

    private func openBundle() throws -> PITBundle {
        let url = try XCTUnwrap(Bundle(for: Self.self).resourceURL).appendingPathComponent("TestBundle")
        try XCTSkipUnless(
            FileManager.default.fileExists(atPath: url.appendingPathComponent("manifest.json").path),
            "Copy a bundle to AppTests/TestBundle and generate the project again.")
        return try PITBundle.open(url, checkHashes: true)
    }

    private func load(_ bundle: PITBundle) async throws -> CoreMLBackend {
        let compiled = CompiledModels(folder: URL.cachesDirectory.appendingPathComponent("test-models"))
        return try await CoreMLBackend.load(bundle, compiled: compiled)
    }

    func testTokenizer() throws {
        let bundle = try openBundle()
        try Tokenizer(bundle).check(bundle.manifest)
    }

    /// The gates of docs/parity.md on every position of the golden record.
    func testGoldenRecord() async throws {
        let bundle = try openBundle()
        let golden = try GoldenRecord(bundle)
        let report = try await Parity.verify(try await load(bundle), golden, manifest: bundle.manifest, bundle: "TestBundle")
        add(XCTAttachment(string: jsonText(report.json, indent: 1)))
        XCTAssertEqual(report.failures, [])
    }

    func testContextFull() async throws {
        let bundle = try openBundle()
        let backend = try await load(bundle)
        let prompt = [Int](repeating: bundle.manifest.endIds[0], count: backend.contextLength + 1)
        do {
            _ = try await backend.append(prompt)
            XCTFail("no error")
        } catch {
            XCTAssertEqual(
                error as? PITError,
                .contextFull(used: 0, needed: backend.contextLength + 1, contextLength: backend.contextLength))
        }
        let position = await backend.position()
        XCTAssertEqual(position, 0)
    }

    func testPrefillSpeed() async throws {
        let bundle = try openBundle()
        let backend = try await load(bundle)
        let ids = try XCTUnwrap(bundle.manifest.golden?.prompts.map(\.ids).max { $0.count < $1.count })
        try measureAsync {
            try await backend.reset()
            _ = try await backend.append(ids)
        }
    }

    func testDecodeSpeed() async throws {
        let bundle = try openBundle()
        let backend = try await load(bundle)
        let ids = try XCTUnwrap(bundle.manifest.golden?.prompts.first?.ids)
        let request = GenerationRequest(maxNewTokens: Self.decodedTokens, stopIds: [])
        try measureAsync {
            try await backend.reset()
            _ = try await generate(ids, with: backend, request)
        }
    }

    /// Clock, processor and memory of asynchronous work, which `measure` itself does not wait for.
    private func measureAsync(_ body: @escaping @Sendable () async throws -> Void) throws {
        let failure = Failure()
        measure(metrics: [XCTClockMetric(), XCTCPUMetric(), XCTMemoryMetric()]) {
            let done = expectation(description: "measured")
            Task.detached {
                do { try await body() } catch { await failure.keep(error.localizedDescription) }
                done.fulfill()
            }
            wait(for: [done], timeout: 600)
        }
        let checked = expectation(description: "checked")
        Task.detached {
            let sentence = await failure.sentence
            XCTAssertNil(sentence)
            checked.fulfill()
        }
        wait(for: [checked], timeout: 10)
    }
}

private actor Failure {
    private(set) var sentence: String?
    func keep(_ text: String) { sentence = sentence ?? text }
}
