import Foundation
import XCTest

@testable import PITCore

final class BundleTests: XCTestCase {
    /// Every case of runtime_tests/vectors/manifests.
    func testManifestVectors() throws {
        let vectors = Vectors.folder.appendingPathComponent("manifests")
        let cases = try Vectors.json(vectors.appendingPathComponent("index.json")).list("cases")
        XCTAssertGreaterThan(cases.count, 30)
        for vector in cases {
            let folder = try TemporaryFolder()
            let bundle = try build(vector, vectors, folder)
            let name = try vector.text("name")
            let checkHashes = try XCTUnwrap(vector.field("check_hashes").bool)
            let expected = try vector.text("expect")
            if expected == "ok" {
                XCTAssertNoThrow(try PITBundle.open(bundle, checkHashes: checkHashes), name)
                continue
            }
            let error = thrown { _ = try PITBundle.open(bundle, checkHashes: checkHashes) }
            guard case .bundle(let kind, let sentence) = error else {
                XCTFail("\(name): \(String(describing: error))")
                continue
            }
            XCTAssertEqual(kind.rawValue, expected, "\(name): \(sentence)")
        }
    }

    private func build(_ vector: JSONValue, _ vectors: URL, _ folder: TemporaryFolder) throws -> URL {
        let manifest = try Data(contentsOf: vectors.appendingPathComponent(try vector.text("manifest")))
        try folder.write("bundle/manifest.json", manifest)
        for file in try vector.list("files") {
            let path = try "bundle/" + file.text("path")
            if let link = file["link"]?.string {
                try FileManager.default.createSymbolicLink(
                    atPath: folder.url.appendingPathComponent(path).path, withDestinationPath: link)
            } else {
                try folder.write(path, Data(try file.text("text").utf8))
            }
        }
        return folder.url.appendingPathComponent("bundle")
    }

    private func goodBundle(_ folder: TemporaryFolder, name: String = "good_coreml") throws -> URL {
        let vectors = Vectors.folder.appendingPathComponent("manifests")
        let cases = try Vectors.json(vectors.appendingPathComponent("index.json")).list("cases")
        return try build(try XCTUnwrap(cases.first { $0["name"]?.string == name }), vectors, folder)
    }

    func testBothVersionsAreInTheSentence() throws {
        let manifest = Data(#"{"format": "pit-deploy bundle", "format_version": 7, "more": 1}"#.utf8)
        let error = thrown { _ = try Manifest.parse(manifest) }
        guard case .bundle(.newerVersion, let sentence) = error else { return XCTFail(String(describing: error)) }
        XCTAssertEqual(sentence, "manifest.json has format version 7, and this app reads version 1; update the app.")
    }

    /// A weight file that is one byte short, and one with another byte, are found before a runtime opens anything.
    func testDamagedWeights() throws {
        let folder = try TemporaryFolder()
        let bundle = try goodBundle(folder)
        let weights = bundle.appendingPathComponent("model.mlpackage/Data/com.apple.CoreML/weights/weight.bin")
        try Data("weight".utf8).write(to: weights)
        guard case .bundle(.wrongSize, let cut)? = thrown({ _ = try PITBundle.open(bundle) }) else { return XCTFail("size") }
        XCTAssertTrue(cut.contains("has 6 bytes, and the manifest says 7"), cut)
        try Data("weightz".utf8).write(to: weights)
        XCTAssertNoThrow(try PITBundle.open(bundle))
        guard case .bundle(.wrongHash, let changed)? = thrown({ _ = try PITBundle.open(bundle, checkHashes: true) })
        else { return XCTFail("hash") }
        XCTAssertTrue(changed.contains("weight.bin has changed"), changed)
    }

    func testLinksInCircles() throws {
        let folder = try TemporaryFolder()
        let bundle = try goodBundle(folder)
        let tokenizer = bundle.appendingPathComponent("tokenizer.json")
        try FileManager.default.removeItem(at: tokenizer)
        try FileManager.default.createSymbolicLink(atPath: tokenizer.path, withDestinationPath: "tokenizer.json")
        guard case .bundle(.unreadableFile, _)? = thrown({ _ = try PITBundle.open(bundle) }) else { return XCTFail("loop") }
    }

    func testSHA256() throws {
        let folder = try TemporaryFolder()
        // Lengths around the blocks of 64 bytes and the pieces of 1 MiB, from Python's hashlib.
        let known = [
            (0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            (55, "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318"),
            (56, "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a"),
            (63, "7d3e74a05d7db15bce4ad9ec0658ea98e3f06eeecf16b4c6fff2da457ddc2f34"),
            (64, "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb"),
            (65, "635361c48bb9eab14198e76ea8ab7f1a41685d6ad62aa9146d301d4f17eb0ae0"),
            (1_048_577, "4a3f0c0c213adea174f9a3d4c13177315b588bdb2e9c1012d3d0bf0453ca0f6a"),
        ]
        for (count, expected) in known {
            try folder.write("a", Data(repeating: UInt8(ascii: "a"), count: count))
            var seen = 0
            XCTAssertEqual(try sha256(of: folder.url.appendingPathComponent("a")) { seen += $0 }, expected, "\(count)")
            XCTAssertEqual(seen, count)
        }
        var digest = SHA256Digest()
        for piece in ["ab", "", "c"] { digest.update(data: Data(piece.utf8)) }
        XCTAssertEqual(
            hexadecimal(digest.finalize()), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    }
}

final class BundleStoreTests: XCTestCase {
    private var folder: TemporaryFolder?

    /// Set a store and a good bundle up, the bundle beside it.
    private func make() throws -> (BundleStore, URL) {
        let folder = try TemporaryFolder()
        self.folder = folder
        let vectors = Vectors.folder.appendingPathComponent("manifests/good_coreml.json")
        try folder.write("given/manifest.json", try Data(contentsOf: vectors))
        for (path, text) in [
            ("model.mlpackage/Data/com.apple.CoreML/model.mlmodel", "program"),
            ("model.mlpackage/Data/com.apple.CoreML/weights/weight.bin", "weights"),
            ("model.mlpackage/Manifest.json", "{}\n"), ("tokenizer.json", "{}\n"), ("Überblick 概要.txt", ""),
            ("not listed.txt", "x"),
        ] { try folder.write("given/" + path, Data(text.utf8)) }
        return (BundleStore(folder: folder.url.appendingPathComponent("store")), folder.url.appendingPathComponent("given"))
    }

    private func names(_ folder: URL) -> [String] {
        (try? FileManager.default.contentsOfDirectory(atPath: folder.path).sorted()) ?? []
    }

    func testImportAndReplace() throws {
        let (store, given) = try make()
        let bundle = try store.add(given)
        XCTAssertEqual(bundle.url.lastPathComponent, "given")
        XCTAssertEqual(names(store.folder), ["given"])
        XCTAssertEqual(names(bundle.url), ["manifest.json", "model.mlpackage", "tokenizer.json", "Überblick 概要.txt"].sorted())
        XCTAssertNoThrow(try PITBundle.open(bundle.url, checkHashes: true))
        _ = try store.add(given)
        XCTAssertEqual(store.bundles().map(\.lastPathComponent), ["given"])
        XCTAssertEqual(bundle.modelBytes, 17)
        try store.remove(bundle.url)
        XCTAssertEqual(names(store.folder), [])
    }

    /// A copy that fails its hashes leaves the store as it was, and so does one that is cancelled.
    func testFailedImport() throws {
        let (store, given) = try make()
        _ = try store.add(given)
        try Data("WEIGHTS".utf8).write(
            to: given.appendingPathComponent("model.mlpackage/Data/com.apple.CoreML/weights/weight.bin"))
        guard case .bundle(.wrongHash, _)? = thrown({ _ = try store.add(given) }) else { return XCTFail("hash") }
        XCTAssertEqual(names(store.folder), ["given"])
        XCTAssertThrowsError(try store.add(given) { _ in throw CancellationError() }) { XCTAssertTrue($0 is CancellationError) }
        XCTAssertEqual(names(store.folder), ["given"])
        XCTAssertNoThrow(try PITBundle.open(store.folder.appendingPathComponent("given"), checkHashes: true))
    }

    func testUnfinishedCopiesAreRemoved() throws {
        let (store, given) = try make()
        _ = try store.add(given)
        let left = store.folder.appendingPathComponent(".given.partial-1")
        try FileManager.default.createDirectory(at: left, withIntermediateDirectories: true)
        XCTAssertEqual(store.bundles().map(\.lastPathComponent), ["given"])
        XCTAssertEqual(names(store.folder), ["given"])
    }
}
