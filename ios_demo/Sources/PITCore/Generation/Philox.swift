/// Random numbers that depend on a seed and a step and on nothing else; docs/sampling.md defines them.
public enum Philox {
    public typealias Words = (UInt32, UInt32, UInt32, UInt32)

    /// Four random words for a counter of four words and a key of two: Philox 4x32 with 10 rounds.
    public static func words(counter: Words, key: (UInt32, UInt32)) -> Words {
        var c = counter
        var k = key
        for _ in 0..<10 {
            let a = UInt64(0xD251_1F53) * UInt64(c.0)
            let b = UInt64(0xCD9E_8D57) * UInt64(c.2)
            c = (high(b) ^ c.1 ^ k.0, low(b), high(a) ^ c.3 ^ k.1, low(a))
            k = (k.0 &+ 0x9E37_79B9, k.1 &+ 0xBB67_AE85)
        }
        return c
    }

    /// A number in [0, 1) of 53 random bits.
    public static func uniform(seed: UInt64, step: UInt64) -> Double {
        let w = words(counter: (low(step), high(step), 0, 0), key: (low(seed), high(seed)))
        return (Double(w.0 >> 5) * 0x1p26 + Double(w.1 >> 6)) / 0x1p53
    }

    private static func low(_ value: UInt64) -> UInt32 { UInt32(truncatingIfNeeded: value) }
    private static func high(_ value: UInt64) -> UInt32 { UInt32(truncatingIfNeeded: value >> 32) }
}
