package org.pitdeploy.core

/** Random numbers from a counter: Philox 4x32 with 10 rounds (docs/sampling.md). */
object Philox {
    private const val LOW = 0xFFFFFFFFL

    /** Four 32-bit words for a counter of four words and a key of two, each in the low half of a Long. */
    fun words(counter: LongArray, key: LongArray): LongArray {
        var (c0, c1, c2, c3) = counter.toList()
        var (k0, k1) = key.toList()
        repeat(10) {
            val a = 0xD2511F53L * c0
            val b = 0xCD9E8D57L * c2
            val first = (b ushr 32) xor c1 xor k0
            val third = (a ushr 32) xor c3 xor k1
            c1 = b and LOW
            c3 = a and LOW
            c0 = first
            c2 = third
            k0 = (k0 + 0x9E3779B9L) and LOW
            k1 = (k1 + 0xBB67AE85L) and LOW
        }
        return longArrayOf(c0, c1, c2, c3)
    }

    /** A number in [0, 1) of 53 random bits, given by [seed] and [step] alone. */
    fun uniform(seed: ULong, step: ULong): Double {
        val counter = longArrayOf(step.toLong() and LOW, (step shr 32).toLong(), 0, 0)
        val key = longArrayOf(seed.toLong() and LOW, (seed shr 32).toLong())
        val words = words(counter, key)
        return ((words[0] ushr 5) * 67108864.0 + (words[1] ushr 6)) / 9007199254740992.0
    }
}
