import XCTest

@testable import PITCore

final class MeasureTests: XCTestCase {
    private func golden(_ vectors: JSONObject) throws -> GoldenRecord {
        let folder = Vectors.folder.appendingPathComponent(try XCTUnwrap(vectors["golden"]?.string))
        return try GoldenRecord(
            json: try Data(contentsOf: folder.appendingPathComponent("golden.json")),
            tensors: try Data(contentsOf: folder.appendingPathComponent("golden.safetensors")), file: "golden.json")
    }

    /// Equal within 1e-9 plus 1e-6 of the figure; NaN and infinities as they are.
    private func assertClose(_ mine: Double, _ theirs: Double, _ name: String) {
        if theirs.isNaN { return XCTAssertTrue(mine.isNaN, name) }
        if theirs.isInfinite { return XCTAssertEqual(mine, theirs, name) }
        XCTAssertEqual(mine, theirs, accuracy: 1e-9 + 1e-6 * theirs.magnitude, name)
    }

    func testGates() throws {
        let gates = try Vectors.read("parity.json").list("gates")
        XCTAssertEqual(gates.count, 12)
        for vector in gates {
            let precision = try vector.text("precision")
            let gate = try Gate.of(runtime: try vector.text("runtime"), weights: precision, tables: precision)
            XCTAssertEqual(
                gate,
                Gate(
                    maxAbs: vector["max_abs"]?.double, meanKL: try vector.number("mean_kl"), top1: try vector.number("top1"),
                    greedy: try XCTUnwrap(vector.field("greedy").bool), layer: try vector.number("layer")))
        }
        XCTAssertEqual(Gate.coarsest("int8", "fp32"), "int8")
        XCTAssertEqual(Gate.coarsest("fp16", "int4"), "int4")
    }

    func testPositions() throws {
        let vectors = try Vectors.read("parity.json")
        let golden = try golden(vectors)
        for vector in try vectors.list("positions") {
            let found = Parity.compare(golden, position: try vector.whole("position"), try vector.field("logits").floats())
            let (name, expected) = (try vector.text("name"), try vector.field("expected"))
            assertClose(found.kl, try expected.number("kl"), name)
            assertClose(found.maxAbs, try expected.number("max_abs"), name)
            XCTAssertEqual(found.top1, expected["top1"]?.bool, name)
        }
    }

    func testReports() async throws {
        let vectors = try Vectors.read("parity.json")
        let golden = try golden(vectors)
        for vector in try vectors.list("reports") {
            let name = try vector.text("name")
            let runs = try XCTUnwrap(vectors["artifacts"]?.list(try vector.text("artifact")))
            let backend = try RecordedBackend(
                runs, contextLength: try XCTUnwrap(vectors["context_length"]?.integer), vocabSize: golden.vocabSize)
            let report = try await Parity.verify(
                backend, golden, runtime: try vector.text("runtime"), weights: try vector.text("weights"),
                tables: try vector.text("tables"), endIds: try XCTUnwrap(vectors["end_ids"]).integers(), bundle: name)
            let expected = try vector.field("expected")
            XCTAssertEqual(report.passed, expected["passed"]?.bool, name)
            XCTAssertEqual(report.failures.count, expected["failures"]?.integer, "\(name): \(report.failures)")
            for figure in ["max_abs_logit_error", "mean_kl", "worst_kl", "top1", "one_pass_against_steps_max_abs"] {
                assertClose(try report.json.number(figure), try expected.number(figure), "\(name): \(figure)")
            }
            for count in ["positions", "greedy_tokens", "greedy_equal"] {
                XCTAssertEqual(try report.json.whole(count), try expected.whole(count), "\(name): \(count)")
            }
        }
    }

    func testAnotherModelsRecord() async throws {
        let golden = try golden(try Vectors.read("parity.json"))
        let backend = ScriptedBackend(contextLength: 100, vocabSize: 9, draws: [])
        let error = await thrown {
            _ = try await Parity.verify(
                backend, golden, runtime: "coreml", weights: "fp16", tables: "fp16", endIds: [1], bundle: "x")
        }
        guard case .input? = error else { return XCTFail(String(describing: error)) }
    }

    func testDamagedRecords() throws {
        let folder = Vectors.folder.appendingPathComponent("golden")
        let json = try Data(contentsOf: folder.appendingPathComponent("golden.json"))
        let tensors = try Data(contentsOf: folder.appendingPathComponent("golden.safetensors"))
        for cut in [0, 7, 100, tensors.count - 1] {
            XCTAssertNotNil(thrown { _ = try GoldenRecord(json: json, tensors: tensors.prefix(cut), file: "golden.json") })
        }
        let text = try XCTUnwrap(String(data: json, encoding: .utf8))
        for (old, new) in [
            ("\"golden_version\": 1", "\"golden_version\": 2"), ("\"vocab_size\": 432", "\"vocab_size\": 9"),
            ("\"greedy_prompt\": 0", "\"greedy_prompt\": 7"),
        ] {
            let changed = text.replacingOccurrences(of: old, with: new)
            XCTAssertNotEqual(changed, text, old)
            XCTAssertNotNil(thrown { _ = try GoldenRecord(json: Data(changed.utf8), tensors: tensors, file: "golden.json") })
        }
    }

    func testBenchVectors() throws {
        let vectors = try Vectors.read("bench.json")
        for vector in try vectors.list("statistics") {
            let samples = try XCTUnwrap(Samples(try vector.list("samples").map { try $0.anyDouble() }))
            assertSame(samples.json, try vector.field("expected"))
        }
        for vector in try vectors.list("runs") {
            let seconds = try vector.field("seconds")
            let prefill = try seconds.list("prefill").map { (try $0.whole("tokens"), try $0.list("samples").map { try $0.anyDouble() }) }
            let decode = try seconds.list("decode").map { (try $0.whole("depth"), try $0.list("samples").map { try $0.anyDouble() }) }
            let expected = try vector.field("expected")
            assertSame(BenchReport.prefillJSON(prefill), try expected.field("prefill"))
            assertSame(BenchReport.decodeJSON(decode, newTokens: try vector.whole("new_tokens")), try expected.field("decode"))
        }
        XCTAssertNil(Samples([]))
    }

    /// The same fields in the same order, the numbers equal to 1e-12.
    private func assertSame(_ mine: JSONValue, _ theirs: JSONValue) {
        switch (mine, theirs) {
        case (.array(let a), .array(let b)):
            XCTAssertEqual(a.count, b.count)
            for (x, y) in zip(a, b) { assertSame(x, y) }
        case (.object(let a), .object(let b)):
            XCTAssertEqual(a.keys, b.keys)
            for (x, y) in zip(a.values, b.values) { assertSame(x, y) }
        default:
            guard let a = mine.double, let b = theirs.double else { return XCTAssertEqual(mine, theirs) }
            XCTAssertEqual(a, b, accuracy: 1e-12 * Swift.max(1, b.magnitude))
        }
    }

    /// A whole benchmark over a scripted backend. Its JSON goes to $PIT_BENCH_JSON, where the schema is checked.
    func testBenchmark() async throws {
        let backend = ScriptedBackend(contextLength: 64, draws: [Int](repeating: 3, count: 10_000))
        var report = BenchReport(
            createdBy: ["pit-deploy iOS demo": "0.1.0"],
            machine: BenchReport.Machine(
                system: "Linux", architecture: "x86_64", processor: nil, cores: 2, memoryBytes: 1 << 30),
            settings: BenchReport.Settings(promptTokens: [8, 32], depths: [0, 16], newTokens: 4, repeats: 3, text: "a test"),
            name: "bundle", runtime: "scripted", path: "bundle", precision: "int8, tables int8, untied", modelBytes: 10,
            totalBytes: 20)
        try await Benchmark.run(backend, ids: [1, 2, 3], loadSeconds: 0.5, into: &report)
        XCTAssertEqual(report.prefill.map(\.seconds.count), [3, 3])
        XCTAssertEqual(report.decode.map(\.seconds.count), [3, 3])
        XCTAssertTrue(report.firstTokenSeconds.allSatisfy { $0 > 0.5 })
        let ran = await backend.ran
        XCTAssertTrue(ran.contains((0..<32).map { $0 % 3 + 1 }))
        report.memory = BenchReport.Memory(beforeLoad: 1 << 20, afterLoad: 2 << 20, peak: 3 << 20)
        let golden = try golden(try Vectors.read("parity.json"))
        let vectors = try Vectors.read("parity.json")
        let recorded = try RecordedBackend(
            try XCTUnwrap(vectors["artifacts"]?.list("int8")), contextLength: 48, vocabSize: golden.vocabSize)
        report.parity = try await Parity.verify(
            recorded, golden, runtime: "onnx", weights: "int8", tables: "int8", endIds: [420], bundle: "bundle")
        if let folder = ProcessInfo.processInfo.environment["PIT_BENCH_JSON"] {
            let file = URL(fileURLWithPath: folder)
            try Data(jsonText(report.json, indent: 1).utf8).write(to: file)
        }

        report.settings.promptTokens = [100]
        let error = await thrown { try await Benchmark.run(backend, ids: [1], loadSeconds: 0, into: &report) }
        guard case .input? = error else { return XCTFail(String(describing: error)) }
    }
}
