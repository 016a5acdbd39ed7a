/// One call of a function: `ids` as padded, the position of the first of them, and which of them are real.
public struct FunctionCall: Sendable, Equatable {
    public let function: Manifest.CoreMLFunction
    public let ids: [Int32]
    public let position: Int
    public let real: Range<Int>

    /// The number of the last real token, for functions with an input `last`; nil for others.
    public var last: Int? { function.inputs.contains { $0.name == "last" } ? real.upperBound - 1 : nil }

    /// The row of the logits that is that token's, of a function that gives `rows` rows.
    public func row(of rows: Int) -> Int { rows > 1 ? real.upperBound - 1 : 0 }
}

/// How the functions of a Core ML program are called for one sequence (docs/coreml.md): a prompt goes through `prefill`
/// in pieces of fixed size, padded where they are shorter, single tokens through `decode`. The mask is made inside the
/// program from the position.
public struct SequencePlan: Sendable {
    public let prefill: Manifest.CoreMLFunction?
    public let decode: Manifest.CoreMLFunction
    /// Whether the caches are passed in and out, and not kept in states.
    public let passesCaches: Bool
    /// Tokens that the cache has room for; a little more than the context in some profiles.
    public let cacheLength: Int

    /// Fewer tokens go one by one: a padded call costs about as much.
    private static let fewestForPrefill = 4

    public init(_ manifest: Manifest) throws {
        func named(_ name: String) -> Manifest.CoreMLFunction? { manifest.coreml?.functions.first { $0.name == name } }
        guard let decode = named("decode") else {
            throw PITError.bundle(
                kind: .badValue, "The manifest's coreml has no function decode; export the bundle again.")
        }
        self.decode = decode
        prefill = named("prefill")
        passesCaches = manifest.states.contains { $0.output != nil }
        let shape = manifest.states.first?.shape ?? []
        if shape.count > 2, case .fixed(let length) = shape[2] {
            cacheLength = length
        } else {
            cacheLength = manifest.contextLength
        }
    }

    /// The calls that append `ids` to a cache of `position` tokens, in order.
    public func calls(_ ids: [Int], position start: Int) -> [FunctionCall] {
        var calls: [FunctionCall] = []
        var rest = ids[...]
        var position = start
        while !rest.isEmpty {
            let call = next(rest, position)
            calls.append(call)
            position += call.real.count
            rest = rest.dropFirst(call.real.count)
        }
        return calls
    }

    private func next(_ rest: ArraySlice<Int>, _ position: Int) -> FunctionCall {
        guard let prefill, rest.count >= min(Self.fewestForPrefill, prefill.tokens) else { return single(rest, position) }
        let size = prefill.tokens
        if passesCaches {
            // The newest token is the last one, so that padding can only stand before the first token of all.
            if position > 0, rest.count < size { return single(rest, position) }
            let count = position > 0 ? size : (rest.count - 1) % size + 1
            let ids = [Int32](repeating: 0, count: size - count) + rest.prefix(count).map(Int32.init)
            return FunctionCall(function: prefill, ids: ids, position: position - (size - count), real: size - count..<size)
        }
        if position + size > cacheLength { return single(rest, position) }
        let count = min(size, rest.count)
        // What is written for the padding lies past the position, and is masked.
        let ids = rest.prefix(count).map(Int32.init) + [Int32](repeating: 0, count: size - count)
        return FunctionCall(function: prefill, ids: ids, position: position, real: 0..<count)
    }

    private func single(_ rest: ArraySlice<Int>, _ position: Int) -> FunctionCall {
        FunctionCall(function: decode, ids: rest.prefix(1).map(Int32.init), position: position, real: 0..<1)
    }
}
