/// The model of a tokenizer.json: byte-pair encoding.
struct BytePairs: Sendable {
    private let ids: [ExactString: Int]
    private let merges: [UInt64: (rank: Int, id: Int)]
    private let unknown: Int?
    private let fusesUnknown: Bool
    private let ignoresMerges: Bool
    /// Ids of `<0x00>` to `<0xFF>`, for characters that the vocabulary lacks; nil without byte fallback.
    private let byteIds: [Int?]?

    init(_ value: JSONValue?) throws {
        let part = try TokenizerPart("model", value ?? .null)
        let kind = try part.kind()
        guard kind == "BPE" else { throw part.unknown(kind, "BPE") }
        for key in ["continuing_subword_prefix", "end_of_word_suffix"] where part.object[key]?.string?.isEmpty == false {
            throw part.unknown("BPE with \(key)", "BPE without")
        }
        guard let vocabulary = part.object["vocab"]?.object else { throw part.missing("vocab", "an object") }
        var ids = [ExactString: Int](minimumCapacity: vocabulary.count)
        for (token, id) in zip(vocabulary.keys, vocabulary.values) {
            guard let id = id.integer, (0...Int(Int32.max)).contains(id) else { throw part.missing("vocab", "ids by token") }
            ids[ExactString(token)] = id
        }
        self.ids = ids
        merges = try Self.readMerges(try part.list("merges"), ids, part)
        unknown = try part.object["unk_token"]?.string.map { token in
            guard let id = ids[ExactString(token)] else { throw part.missing("unk_token", "a token of the vocabulary") }
            return id
        }
        fusesUnknown = part.flag("fuse_unk", absent: false)
        ignoresMerges = part.flag("ignore_merges", absent: false)
        byteIds = part.flag("byte_fallback", absent: false)
            ? (0..<256).map { byte in ids[ExactString("<0x\(byte < 16 ? "0" : "")\(String(byte, radix: 16, uppercase: true))>")] }
            : nil
    }

    private static func readMerges(
        _ list: [JSONValue], _ ids: [ExactString: Int], _ part: TokenizerPart
    ) throws -> [UInt64: (rank: Int, id: Int)] {
        var merges = [UInt64: (rank: Int, id: Int)](minimumCapacity: list.count)
        for (rank, item) in list.enumerated() {
            // Older files have "a b", newer ones ["a", "b"], so that tokens may hold spaces.
            let pair = item.array?.compactMap(\.string)
                ?? item.string.map { $0.unicodeScalars.split(separator: " ", maxSplits: 1).map { String($0) } } ?? []
            guard pair.count == 2, let left = ids[ExactString(pair[0])], let right = ids[ExactString(pair[1])],
                let whole = ids[ExactString(pair[0] + pair[1])]
            else { throw part.missing("merges.\(rank)", "two tokens whose union is one") }
            merges[key(left, right)] = (rank, whole)
        }
        return merges
    }

    private static func key(_ left: Int, _ right: Int) -> UInt64 { UInt64(left) << 32 | UInt64(right) }

    var tokens: some Sequence<(String, Int)> { ids.lazy.map { ($0.key.string, $0.value) } }

    func id(of token: String) -> Int? { ids[ExactString(token)] }

    /// The ids of a word.
    func encode(_ word: String) -> [Int] {
        if ignoresMerges, let whole = ids[ExactString(word)] { return [whole] }
        return merged(symbols(of: word))
    }

    /// The ids of the word's characters. One that the vocabulary lacks becomes its bytes, or the unknown token.
    private func symbols(of word: String) -> [Int] {
        var found: [Int] = []
        var hasUnknown = false
        for scalar in word.unicodeScalars {
            if let id = ids[ExactString(String(scalar))] {
                if hasUnknown, let unknown { found.append(unknown) }
                hasUnknown = false
                found.append(id)
                continue
            }
            if let byteIds {
                let bytes = String(scalar).utf8.compactMap { byteIds[Int($0)] }
                if bytes.count == String(scalar).utf8.count {
                    found += bytes
                    continue
                }
            }
            if hasUnknown, !fusesUnknown, let unknown { found.append(unknown) }
            hasUnknown = unknown != nil
        }
        if hasUnknown, let unknown { found.append(unknown) }
        return found
    }

    private struct Merge {
        let rank: Int
        let place: Int
        let id: Int
    }

    /// Merge pairs, the one of lowest rank first and of those the leftmost, until no two neighbours are a pair.
    private func merged(_ symbols: [Int]) -> [Int] {
        guard symbols.count > 1 else { return symbols }
        var ids = symbols
        var isGone = [Bool](repeating: false, count: ids.count)
        var next = Array(1...ids.count)  // ids.count: none
        var previous = Array(-1..<ids.count - 1)
        var queue = Heap<Merge> { $0.rank == $1.rank ? $0.place < $1.place : $0.rank < $1.rank }
        func push(_ left: Int) {
            guard left >= 0, next[left] < ids.count, let merge = merges[Self.key(ids[left], ids[next[left]])] else { return }
            queue.push(Merge(rank: merge.rank, place: left, id: merge.id))
        }
        for place in 0..<ids.count - 1 { push(place) }
        while let merge = queue.pop() {
            let left = merge.place
            let right = next[left]
            guard !isGone[left], right < ids.count, merges[Self.key(ids[left], ids[right])]?.id == merge.id else { continue }
            ids[left] = merge.id
            isGone[right] = true
            next[left] = next[right]
            if next[right] < ids.count { previous[next[right]] = left }
            push(previous[left])
            push(left)
        }
        return ids.indices.filter { !isGone[$0] }.map { ids[$0] }
    }
}
