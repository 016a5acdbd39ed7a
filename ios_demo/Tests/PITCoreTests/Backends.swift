import XCTest

@testable import PITCore

/// A backend whose nth run has its largest logit at `draws[n - 1]`.
actor ScriptedBackend: DecoderBackend {
    nonisolated let runtimeName = "scripted"
    nonisolated let contextLength: Int
    nonisolated let vocabSize: Int
    private let draws: [Int]
    private(set) var runs = 0
    private(set) var ran: [[Int]] = []
    private var count: Int
    private let canRewind: Bool

    init(contextLength: Int, vocabSize: Int = 32, position: Int = 0, draws: [Int], canRewind: Bool = false) {
        (self.contextLength, self.vocabSize, self.draws, count) = (contextLength, vocabSize, draws, position)
        self.canRewind = canRewind
    }

    func position() -> Int { count }

    func append(_ ids: [Int]) throws -> [Float] {
        try checkRoom(ids, position: count)
        var logits = [Float](repeating: 0, count: vocabSize)
        logits[draws[runs]] = 1
        runs += 1
        ran.append(ids)
        count += ids.count
        return logits
    }

    func reset() { count = 0 }

    func rewind(to position: Int) -> Int {
        if position < count { count = canRewind ? position : 0 }
        return count
    }
}

/// A backend that answers as a recorded one did; a call that was not recorded is an error.
actor RecordedBackend: DecoderBackend {
    nonisolated let runtimeName = "recorded"
    nonisolated let contextLength: Int
    nonisolated let vocabSize: Int
    private let runs: [[Int]: [Float]]
    private var cached: [Int] = []

    init(_ runs: [JSONValue], contextLength: Int, vocabSize: Int) throws {
        (self.contextLength, self.vocabSize) = (contextLength, vocabSize)
        var found: [[Int]: [Float]] = [:]
        for run in runs {
            let logits = try run.field("logits").floats()
            XCTAssertEqual(logits.count, vocabSize)
            found[Self.key(try run.field("cached").integers(), try run.field("new").integers())] = logits
        }
        self.runs = found
    }

    private static func key(_ cached: [Int], _ new: [Int]) -> [Int] { [cached.count] + cached + new }

    func position() -> Int { cached.count }

    func append(_ ids: [Int]) throws -> [Float] {
        try checkRoom(ids, position: cached.count)
        guard let logits = runs[Self.key(cached, ids)] else {
            throw PITError.runtime("No run of \(ids) behind \(cached) was recorded.")
        }
        cached += ids
        return logits
    }

    func reset() { cached = [] }
}
