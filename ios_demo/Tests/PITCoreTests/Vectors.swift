import Foundation
import XCTest

@testable import PITCore

/// The vectors that Python, Kotlin, Swift and JavaScript share: runtime_tests/vectors, or the folder $PIT_VECTORS.
enum Vectors {
    static let folder: URL = {
        if let given = ProcessInfo.processInfo.environment["PIT_VECTORS"] { return URL(fileURLWithPath: given) }
        var repository = URL(fileURLWithPath: #filePath)
        for _ in 0..<4 { repository.deleteLastPathComponent() }
        return repository.appendingPathComponent("runtime_tests/vectors")
    }()

    /// A file of the vectors, of format 1.
    static func read(_ name: String) throws -> JSONObject {
        let object = try json(folder.appendingPathComponent(name))
        XCTAssertEqual(object["format"], .integer(1), "another format of \(name)")
        return object
    }

    static func json(_ file: URL) throws -> JSONObject {
        try XCTUnwrap(JSONParser.parse(Data(contentsOf: file)).object)
    }
}

extension JSONValue {
    func field(_ name: String) throws -> JSONValue { try XCTUnwrap(self[name], "the vector has no field \(name)") }
    func texts() throws -> [String] { try XCTUnwrap(array).map { try XCTUnwrap($0.string) } }
    func integers() throws -> [Int] { try XCTUnwrap(array).map { try XCTUnwrap($0.integer) } }
    func list(_ name: String) throws -> [JSONValue] { try XCTUnwrap(field(name).array) }
    func text(_ name: String) throws -> String { try XCTUnwrap(field(name).string) }
    func whole(_ name: String) throws -> Int { try XCTUnwrap(field(name).integer) }
    func number(_ name: String) throws -> Double { try field(name).anyDouble() }

    /// A number, or the texts "NaN", "Infinity" and "-Infinity".
    func anyDouble() throws -> Double { try XCTUnwrap(double ?? string.flatMap(Double.init)) }

    /// Float32 numbers in base64.
    func floats() throws -> [Float] {
        let data = try XCTUnwrap(Data(base64Encoded: try XCTUnwrap(string)))
        return data.withUnsafeBytes { bytes in
            stride(from: 0, to: bytes.count, by: 4).map {
                Float(bitPattern: UInt32(littleEndian: bytes.loadUnaligned(fromByteOffset: $0, as: UInt32.self)))
            }
        }
    }

    func samplingOptions() throws -> SamplingOptions {
        try SamplingOptions(
            temperature: try number("temperature"), topK: try whole("top_k"), topP: try number("top_p"),
            minP: try number("min_p"), repetitionPenalty: try number("repetition_penalty"),
            seed: try XCTUnwrap(UInt64(try text("seed"))))
    }
}

extension JSONObject {
    func list(_ name: String) throws -> [JSONValue] { try JSONValue.object(self).list(name) }
}

/// A folder that is gone after the test.
final class TemporaryFolder {
    let url: URL

    init() throws {
        url = FileManager.default.temporaryDirectory.appendingPathComponent("pit-\(UUID().uuidString)")
        try FileManager.default.createDirectory(at: url, withIntermediateDirectories: true)
    }

    deinit { try? FileManager.default.removeItem(at: url) }

    func write(_ path: String, _ data: Data) throws {
        let file = url.appendingPathComponent(path)
        try FileManager.default.createDirectory(at: file.deletingLastPathComponent(), withIntermediateDirectories: true)
        try data.write(to: file)
    }
}

/// The sentence of the error that `body` throws; fails where it throws none, or one that is not ours.
func thrown(_ body: () throws -> Void, file: StaticString = #filePath, line: UInt = #line) -> PITError? {
    do {
        try body()
    } catch let error as PITError {
        XCTAssertFalse(error.sentence.contains("\n"), error.sentence, file: file, line: line)
        XCTAssertTrue(error.sentence.hasSuffix("."), error.sentence, file: file, line: line)
        return error
    } catch {
        XCTFail("another kind of error: \(error)", file: file, line: line)
        return nil
    }
    XCTFail("no error", file: file, line: line)
    return nil
}

func thrown(_ body: () async throws -> Void, file: StaticString = #filePath, line: UInt = #line) async -> PITError? {
    let result: Result<Void, any Error>
    do {
        result = .success(try await body())
    } catch {
        result = .failure(error)
    }
    return thrown({ try result.get() }, file: file, line: line)
}
