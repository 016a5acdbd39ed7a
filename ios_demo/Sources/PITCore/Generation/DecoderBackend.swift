/// One loaded model with one sequence in its cache; the loop, parity and the benchmark are written once against it.
///
/// Logits have `vocabSize` numbers. `append` throws before running where the tokens do not fit or an id is unknown
/// (`checkRoom`), and then the cache is as it was.
public protocol DecoderBackend: Sendable {
    /// The runtime with its version, for reports.
    var runtimeName: String { get }
    var contextLength: Int { get }
    var vocabSize: Int { get }

    /// Tokens in the cache.
    func position() async -> Int

    /// Append `ids` (at least one) and return the logits of the last position.
    func append(_ ids: [Int]) async throws -> [Float]

    /// Empty the cache.
    func reset() async throws

    /// Take back the tokens from `position` on, where the runtime can, else empty the cache; returns the tokens left.
    func rewind(to position: Int) async throws -> Int
}

extension DecoderBackend {
    public func rewind(to position: Int) async throws -> Int {
        let present = await self.position()
        if position >= present { return present }
        try await reset()
        return 0
    }

    /// Throw where `ids` is empty, does not fit into the rest of the context, or holds an unknown id.
    public func checkRoom(_ ids: [Int], position: Int) throws {
        if ids.isEmpty { throw PITError.input("The prompt has no tokens; give at least one.") }
        if position + ids.count > contextLength {
            throw PITError.contextFull(used: position, needed: ids.count, contextLength: contextLength)
        }
        if let wrong = ids.first(where: { $0 < 0 || $0 >= vocabSize }) {
            throw PITError.input("Token id \(wrong) is outside the vocabulary of \(vocabSize) rows.")
        }
    }
}
