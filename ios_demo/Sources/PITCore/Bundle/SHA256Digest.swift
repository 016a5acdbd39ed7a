import Foundation

#if canImport(CryptoKit)
import CryptoKit
#endif

/// SHA-256 of a file in 64 lower-case hexadecimal digits, read in pieces of 1 MiB. `progress` gets the bytes read.
func sha256(of file: URL, progress: (Int) throws -> Void = { _ in }) throws -> String {
    let handle = try FileHandle(forReadingFrom: file)
    defer { try? handle.close() }
    #if canImport(CryptoKit)
    var hash = SHA256()
    #else
    var hash = SHA256Digest()
    #endif
    var isAtEnd = false
    while !isAtEnd {
        try autoreleasing {
            let piece = try handle.read(upToCount: 1 << 20) ?? Data()
            hash.update(data: piece)
            isAtEnd = piece.isEmpty
            try progress(piece.count)
        }
    }
    return hexadecimal(hash.finalize())
}

func hexadecimal(_ bytes: some Sequence<UInt8>) -> String {
    let digits = Array("0123456789abcdef")
    return String(bytes.flatMap { [digits[Int($0 >> 4)], digits[Int($0 & 15)]] })
}

/// On Apple's systems pieces that were read stay in memory until a pool is emptied.
private func autoreleasing(_ body: () throws -> Void) rethrows {
    #if canImport(ObjectiveC)
    try autoreleasepool(invoking: body)
    #else
    try body()
    #endif
}

/// SHA-256 as FIPS 180-4 defines it, for systems without CryptoKit.
struct SHA256Digest {
    private var state: [UInt32] = [
        0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19,
    ]
    private var rest: [UInt8] = []
    private var length: UInt64 = 0

    mutating func update(data: Data) {
        length += UInt64(data.count)
        rest += data
        let whole = rest.count / 64 * 64
        rest.withUnsafeBufferPointer { bytes in
            for start in stride(from: 0, to: whole, by: 64) { compress(bytes, start) }
        }
        rest.removeFirst(whole)
    }

    /// The 32 bytes; the value cannot be updated afterwards.
    mutating func finalize() -> [UInt8] {
        let bits = length * 8
        var end: [UInt8] = [0x80]
        end += [UInt8](repeating: 0, count: (119 - rest.count % 64) % 64)
        end += (0..<8).map { UInt8(truncatingIfNeeded: bits >> UInt64(56 - 8 * $0)) }
        update(data: Data(end))
        return state.flatMap { word in (0..<4).map { UInt8(truncatingIfNeeded: word >> UInt32(24 - 8 * $0)) } }
    }

    private mutating func compress(_ bytes: UnsafeBufferPointer<UInt8>, _ start: Int) {
        withUnsafeTemporaryAllocation(of: UInt32.self, capacity: 64) { words in
            for place in 0..<16 {
                let at = start + 4 * place
                words[place] =
                    UInt32(bytes[at]) << 24 | UInt32(bytes[at + 1]) << 16 | UInt32(bytes[at + 2]) << 8
                    | UInt32(bytes[at + 3])
            }
            for place in 16..<64 {
                let a = words[place - 15]
                let b = words[place - 2]
                let s0 = rotated(a, 7) ^ rotated(a, 18) ^ (a >> 3)
                let s1 = rotated(b, 17) ^ rotated(b, 19) ^ (b >> 10)
                words[place] = words[place - 16] &+ s0 &+ words[place - 7] &+ s1
            }
            mix(words)
        }
    }

    private mutating func mix(_ words: UnsafeMutableBufferPointer<UInt32>) {
        var (a, b, c, d) = (state[0], state[1], state[2], state[3])
        var (e, f, g, h) = (state[4], state[5], state[6], state[7])
        for place in 0..<64 {
            let s1 = rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)
            let choice = (e & f) ^ (~e & g)
            let first = h &+ s1 &+ choice &+ Self.constants[place] &+ words[place]
            let s0 = rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)
            let majority = (a & b) ^ (a & c) ^ (b & c)
            (h, g, f, e) = (g, f, e, d &+ first)
            (d, c, b, a) = (c, b, a, first &+ s0 &+ majority)
        }
        for (place, value) in [a, b, c, d, e, f, g, h].enumerated() { state[place] &+= value }
    }

    private func rotated(_ word: UInt32, _ by: UInt32) -> UInt32 { word >> by | word << (32 - by) }

    /// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
    private static let constants: [UInt32] = {
        var primes: [Int] = []
        var candidate = 2
        while primes.count < 64 {
            if !primes.contains(where: { candidate % $0 == 0 }) { primes.append(candidate) }
            candidate += 1
        }
        return primes.map { prime in
            // floor(cbrt(prime) * 2^32) in integers: double has too few digits for the last bit of some.
            var root: UInt64 = 0
            for bit in stride(from: UInt64(34), through: 0, by: -1) {
                let tried = root | 1 << bit
                if cubeIsAtMost(tried, prime) { root = tried }
            }
            return UInt32(truncatingIfNeeded: root)
        }
    }()

    /// Whether `root`^3 <= `prime` * 2^96, for roots below 2^35.
    private static func cubeIsAtMost(_ root: UInt64, _ prime: Int) -> Bool {
        let square = root.multipliedFullWidth(by: root)
        let low = square.low.multipliedFullWidth(by: root)
        let (middle, carry) = low.high.addingReportingOverflow(square.high &* root)
        // The cube is [carry, middle, low.low] in words of 64 bits, and the bound is prime * 2^32 in the middle word.
        let bound = UInt64(prime) << 32
        return !carry && (middle < bound || (middle == bound && low.low == 0))
    }
}
