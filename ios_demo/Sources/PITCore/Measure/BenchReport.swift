/// A figure measured several times, as the bench object has it (docs/benchmarks.md).
public struct Samples: Sendable, Equatable {
    public let values: [Double]

    /// Nil for no values.
    public init?(_ values: [Double]) {
        if values.isEmpty { return nil }
        self.values = values
    }

    public var median: Double {
        let sorted = values.sorted()
        let middle = sorted.count / 2
        return sorted.count % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2
    }

    public var json: JSONValue {
        .object(
            JSONObject([
                ("median", .number(median)), ("min", .number(values.min() ?? 0)), ("max", .number(values.max() ?? 0)),
                ("samples", .array(values.map(JSONValue.number))),
            ]))
    }
}

/// What a benchmark measured of one bundle on this device, and its object of pit_deploy/schemas/bench.schema.json.
public struct BenchReport: Sendable {
    public struct Machine: Sendable {
        public let system: String
        public let architecture: String
        public let processor: String?
        public let cores: Int
        public let memoryBytes: Int

        public init(system: String, architecture: String, processor: String?, cores: Int, memoryBytes: Int) {
            self.system = system
            self.architecture = architecture
            self.processor = processor
            self.cores = cores
            self.memoryBytes = memoryBytes
        }
    }

    public struct Settings: Sendable, Equatable {
        public var threads: Int
        public var promptTokens: [Int]
        public var depths: [Int]
        public var newTokens: Int
        public var repeats: Int
        public var text: String

        public init(
            threads: Int = 1, promptTokens: [Int] = [128, 512], depths: [Int] = [0, 512], newTokens: Int = 32,
            repeats: Int = 5, text: String
        ) {
            self.threads = threads
            self.promptTokens = promptTokens
            self.depths = depths
            self.newTokens = newTokens
            self.repeats = repeats
            self.text = text
        }

        /// Tokens that the cache has to hold.
        public var neededTokens: Int { max(promptTokens.max() ?? 0, (depths.max() ?? 0) + newTokens) }
    }

    /// Resident memory in bytes.
    public struct Memory: Sendable {
        public let beforeLoad: Int
        public let afterLoad: Int
        public let peak: Int

        public init(beforeLoad: Int, afterLoad: Int, peak: Int) {
            self.beforeLoad = beforeLoad
            self.afterLoad = afterLoad
            self.peak = peak
        }
    }

    public var createdBy: [String: String]
    public var machine: Machine
    public var settings: Settings
    public var name: String
    public var runtime: String
    public var path: String
    public var precision: String
    public var modelBytes: Int
    public var totalBytes: Int
    public var loadSeconds: [Double] = []
    public var firstTokenSeconds: [Double] = []
    public var memory: Memory?
    /// Seconds by length of the prompt.
    public var prefill: [(tokens: Int, seconds: [Double])] = []
    /// Seconds of `newTokens` tokens by depth.
    public var decode: [(depth: Int, seconds: [Double])] = []
    public var parity: ParityReport?
    public var error: String?
    public var notes: [String] = []

    /// A report without figures; `Benchmark.run` fills them in.
    public init(
        createdBy: [String: String], machine: Machine, settings: Settings, name: String, runtime: String, path: String,
        precision: String, modelBytes: Int, totalBytes: Int
    ) {
        self.createdBy = createdBy
        self.machine = machine
        self.settings = settings
        self.name = name
        self.runtime = runtime
        self.path = path
        self.precision = precision
        self.modelBytes = modelBytes
        self.totalBytes = totalBytes
    }

    public var json: JSONValue {
        let texts = { (values: [String]) in JSONValue.array(values.map(JSONValue.string)) }
        let integers = { (values: [Int]) in JSONValue.array(values.map(JSONValue.integer)) }
        return object([
            ("format", .string("pit-deploy bench")), ("format_version", .integer(1)),
            ("created_by", object(createdBy.sorted { $0.key < $1.key }.map { ($0.key, .string($0.value)) })),
            (
                "machine",
                object([
                    ("system", .string(machine.system)), ("architecture", .string(machine.architecture)),
                    ("processor", machine.processor.map(JSONValue.string) ?? .null), ("cores", .integer(machine.cores)),
                    ("memory_bytes", .integer(machine.memoryBytes)), ("load_average", .null),
                ])
            ),
            (
                "settings",
                object([
                    ("threads", integers([settings.threads])), ("prompt_tokens", integers(settings.promptTokens)),
                    ("depths", integers(settings.depths)), ("new_tokens", .integer(settings.newTokens)),
                    ("repeats", .integer(settings.repeats)), ("text", .string(settings.text)),
                ])
            ),
            ("bandwidth", .array([])), ("subjects", .array([subject])), ("ratios", .array([])), ("notes", texts(notes)),
        ])
    }

    private var subject: JSONValue {
        object([
            ("name", .string(name)), ("kind", .string("bundle")), ("runtime", .string(runtime)), ("path", .string(path)),
            ("precision", .string(precision)), ("model_bytes", .integer(modelBytes)), ("total_bytes", .integer(totalBytes)),
            ("weight_bytes_per_token", .null), ("quality", quality), ("runs", .array([run])), ("notes", .array([])),
        ])
    }

    private var quality: JSONValue {
        guard let parity, parity.meanKL.isFinite else { return .null }
        return object([
            ("reference", .string(path)), ("positions", .integer(parity.positions.count)),
            ("mean_kl", .number(parity.meanKL)), ("top1", .number(parity.top1)),
        ])
    }

    private var run: JSONValue {
        object([
            ("threads", .integer(settings.threads)), ("error", error.map(JSONValue.string) ?? .null), ("other_cores", .null),
            ("load", load), ("memory", memoryJSON), ("prefill", Self.prefillJSON(prefill)),
            ("decode", Self.decodeJSON(decode, newTokens: settings.newTokens)),
        ])
    }

    /// A phone cannot drop an artifact's pages: what it measures is a warm start.
    private var load: JSONValue {
        guard let seconds = Samples(loadSeconds), let first = Samples(firstTokenSeconds) else { return .null }
        return object([
            ("cold", .null),
            ("warm", object([("seconds", seconds.json), ("first_token_seconds", first.json), ("resident_share", .null)])),
        ])
    }

    private var memoryJSON: JSONValue {
        guard let memory else { return .null }
        func one(_ bytes: Int) -> JSONValue { Samples([Double(bytes)])?.json ?? .null }
        return object([
            ("before_load_bytes", one(memory.beforeLoad)), ("after_load_bytes", one(memory.afterLoad)),
            ("private_after_load_bytes", .null), ("peak_bytes", one(memory.peak)),
        ])
    }

    static func prefillJSON(_ figures: [(tokens: Int, seconds: [Double])]) -> JSONValue {
        .array(figures.compactMap { tokens, seconds in
            guard let times = Samples(seconds), let speeds = Samples(seconds.map { Double(tokens) / $0 }) else { return nil }
            return object([
                ("tokens", .integer(tokens)), ("tokens_per_second", speeds.json), ("time_to_first_token_seconds", times.json),
            ])
        })
    }

    static func decodeJSON(_ figures: [(depth: Int, seconds: [Double])], newTokens: Int) -> JSONValue {
        .array(figures.compactMap { depth, seconds in
            guard let speeds = Samples(seconds.map { Double(newTokens) / $0 }) else { return nil }
            return object([
                ("depth", .integer(depth)), ("tokens", .integer(newTokens)), ("tokens_per_second", speeds.json),
                ("bandwidth_share", .null),
            ])
        })
    }
}

private func object(_ fields: [(String, JSONValue)]) -> JSONValue { .object(JSONObject(fields)) }
