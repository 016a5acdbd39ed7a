/// How a token is drawn. The default is greedy; `topK` 0, `topP` 1, `minP` 0 and penalty 1 are off.
public struct SamplingOptions: Sendable, Equatable {
    public let temperature: Double
    public let topK: Int
    public let topP: Double
    public let minP: Double
    public let repetitionPenalty: Double
    public let seed: UInt64

    public static let greedy = SamplingOptions()

    private init() {
        (temperature, topK, topP, minP, repetitionPenalty, seed) = (0, 0, 1, 0, 1, 0)
    }

    /// Throws `PITError.input`, which names the option, for a value outside its range.
    public init(
        temperature: Double = 0, topK: Int = 0, topP: Double = 1, minP: Double = 0, repetitionPenalty: Double = 1,
        seed: UInt64 = 0
    ) throws {
        func check(_ name: String, _ value: Double, _ allowed: Bool, _ range: String) throws {
            if !value.isFinite || !allowed {
                throw PITError.input("\(name) must be a finite number \(range), but is \(value).")
            }
        }
        try check("temperature", temperature, temperature >= 0, "of 0 (greedy) or more")
        if topK < 0 { throw PITError.input("top_k must be a whole number of 0 (off) or more, but is \(topK).") }
        try check("top_p", topP, 0 <= topP && topP <= 1, "from 0 to 1 (off)")
        try check("min_p", minP, 0 <= minP && minP <= 1, "from 0 (off) to 1")
        try check("repetition_penalty", repetitionPenalty, repetitionPenalty > 0, "above 0")
        self.temperature = temperature
        self.topK = topK
        self.topP = topP
        self.minP = minP
        self.repetitionPenalty = repetitionPenalty
        self.seed = seed
    }

    /// Take the fields of a generation_config.json. `do_sample` false or absent means greedy; a field that is absent
    /// or null is off.
    public init(generationConfig config: JSONObject, seed: UInt64 = 0) throws {
        func number(_ name: String, _ absent: Double) throws -> Double {
            guard let value = config[name], !value.isNull else { return absent }
            guard let number = value.double else {
                throw PITError.input("generation_config.json: \(name) must be a number, but is \(jsonText(value)).")
            }
            return number
        }
        let isSampling = config["do_sample"]?.bool ?? false
        let topK = try number("top_k", 0)
        guard let wholeTopK = Int(exactly: topK) else {
            throw PITError.input("generation_config.json: top_k must be a whole number, but is \(topK).")
        }
        try self.init(
            temperature: isSampling ? try number("temperature", 1) : 0, topK: wholeTopK,
            topP: try number("top_p", 1), minP: try number("min_p", 0),
            repetitionPenalty: try number("repetition_penalty", 1), seed: seed)
    }
}
