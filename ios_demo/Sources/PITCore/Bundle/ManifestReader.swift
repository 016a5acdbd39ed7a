import Foundation

extension Manifest {
    /// Read manifest.json. Throws `PITError.bundle`, a sentence that names `file`, for anything wrong with the text;
    /// the files that it lists are the business of `PITBundle.open`.
    public static func parse(_ data: Data, file: String = "manifest.json") throws -> Manifest {
        let value = try parseJSON(data, file: file)
        guard let object = value.object, let found = object["format"]?.string, found.isExactly(format) else {
            throw PITError.bundle(
                kind: .notABundle,
                "\(file) is not the manifest of a pit-deploy bundle (a manifest is an object whose 'format' is "
                    + "'\(format)'); give the folder that pit-deploy export wrote.")
        }
        try checkVersion(object, file)
        let fields = Fields(object, file: file)
        let manifest = try Manifest(fields)
        try fields.end()
        try manifest.checkRules(file)
        return manifest
    }

    private static func checkVersion(_ object: JSONObject, _ file: String) throws {
        let fields = Fields(object, file: file)
        guard let value = object["format_version"] else {
            throw fields.failure(.missingField, "format_version", "is missing")
        }
        guard let version = value.integer else {
            throw fields.failure(.badValue, "format_version", "is \(jsonText(value)): it should be an integer")
        }
        let both = "\(file) has format version \(version), and this app reads version \(formatVersion)"
        if version > formatVersion { throw PITError.bundle(kind: .newerVersion, "\(both); update the app.") }
        if version < formatVersion {
            throw PITError.bundle(kind: .olderVersion, "\(both); export the bundle again with a pit-deploy of today.")
        }
    }

    private init(_ fields: Fields) throws {
        _ = try fields.value("format")
        _ = try fields.value("format_version")
        createdBy = try fields.textsByName("created_by")
        source = try fields.object("source", Source.init)
        folds = try fields.texts("folds")
        layout = try fields.word("layout", ["untied", "shared"])
        runtime = try fields.word("runtime", ["onnx", "executorch", "coreml"])
        profile = try fields.text("profile")
        modelFile = try fields.path("model_file")
        precision = try fields.object("precision", Precision.init)
        architecture = try fields.object("architecture", Architecture.init)
        inputs = try fields.objects("inputs", atLeast: 1, TensorValue.init)
        outputs = try fields.objects("outputs", atLeast: 1, TensorValue.init)
        states = try fields.objects("states", TensorState.init)
        hiddenStates = try fields.texts("hidden_states")
        logits = try fields.word("logits", ["last", "all"])
        vocabSize = try fields.count("vocab_size")
        tokenizerLength = try fields.count("tokenizer_length")
        contextLength = try fields.count("context_length")
        bosId = try fields.optional("bos_id") { fields, key in try fields.integer(key, 0...Int(Int32.max)) }
        endIds = try fields.ids("end_ids", atLeast: 1)
        chatTemplate = try fields.flag("chat_template")
        quantization = try fields.objects("quantization", TensorError.init)
        quantizationSummary = try fields.optional("quantization_summary") { fields, key in
            try fields.object(key, QuantizationSummary.init)
        }
        tokenizerChecks = try fields.objects("tokenizer_checks", atLeast: 1, TokenizedText.init)
        coreml = try fields.optional("coreml") { fields, key in try fields.object(key, CoreMLProgram.init) }
        nestedHead = try fields.has("nested_head")
            ? fields.optional("nested_head") { fields, key in try fields.object(key, NestedHead.init) } : nil
        golden = try fields.optional("golden") { fields, key in try fields.object(key, GoldenEntry.init) }
        files = try fields.objects("files", atLeast: 1) { fields in
            FileEntry(
                path: try fields.path("path"), size: try fields.integer("size", 0...mostBytes),
                sha256: try fields.sha256("sha256"))
        }
    }
}

/// The largest integer that JavaScript holds exactly.
private let mostBytes = 1 << 53 - 1
private let numberFormats = ["fp32", "fp16", "int8", "int4"]
private let elementTypes = [
    "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "int4", "uint4", "bool",
]

/// JSON of a file of the bundle; throws `bad_json` with the place of the fault.
func parseJSON(_ data: Data, file: String) throws -> JSONValue {
    do {
        return try JSONParser.parse(data)
    } catch {
        throw PITError.bundle(
            kind: .badJSON,
            "\(file) is not usable JSON at line \(error.line), column \(error.column) (\(error.reason)); \(fetchAgain)")
    }
}

extension Manifest.Source {
    fileprivate init(_ fields: Fields) throws {
        name = try fields.text("name", longest: 255)
        if name.utf8.contains(where: { $0 == UInt8(ascii: "/") || $0 == UInt8(ascii: "\\") }) {
            throw fields.failure(.badValue, "name", "is \(shown(name)): it should be a name without a path")
        }
        modelType = try fields.text("model_type")
        kind = try fields.word("kind", ["pit", "folded", "plain"])
        files = try fields.objects("files") { fields in
            Manifest.FileEntry(
                path: try fields.path("name"), size: try fields.integer("size", 0...mostBytes),
                sha256: try fields.sha256("sha256"))
        }
        license = try fields.optional("license") { fields, key in try fields.text(key) }
    }
}

extension Manifest.NestedHead {
    fileprivate init(_ fields: Fields) throws {
        columns = try fields.count("columns")
        shortlist = try fields.count("shortlist")
        missRate = try fields.optional("miss_rate") { fields, key in try fields.figure(key) }
        kl = try fields.optional("kl") { fields, key in try fields.figure(key) }
        positions = try fields.optional("positions") { fields, key in try fields.count(key) }
    }
}

extension Manifest.Precision {
    fileprivate init(_ fields: Fields) throws {
        weights = try fields.word("weights", numberFormats)
        tables = try fields.word("tables", numberFormats)
        activations = try fields.word("activations", ["fp32", "fp16", "int8"])
        blockSize = try fields.optional("block_size") { fields, key in try fields.count(key) }
        symmetric = try fields.optional("symmetric") { fields, key in try fields.flag(key) }
        accuracyLevel = try fields.optional("accuracy_level") { fields, key in try fields.integer(key, 0...4) }
        kvCache = try fields.word("kv_cache", ["fp32", "fp16", "int8"])
    }
}

extension Manifest.Architecture {
    fileprivate init(_ fields: Fields) throws {
        modelType = try fields.text("model_type")
        hiddenSize = try fields.count("hidden_size")
        numHiddenLayers = try fields.count("num_hidden_layers")
        numAttentionHeads = try fields.count("num_attention_heads")
        numKeyValueHeads = try fields.count("num_key_value_heads")
        headDim = try fields.count("head_dim")
        intermediateSize = try fields.count("intermediate_size")
    }
}

extension Manifest.TensorValue {
    fileprivate init(_ fields: Fields) throws {
        name = try fields.text("name")
        dtype = try fields.word("dtype", elementTypes)
        shape = try fields.shape("shape")
    }
}

extension Manifest.TensorState {
    fileprivate init(_ fields: Fields) throws {
        name = try fields.text("name")
        output = try fields.optional("output") { fields, key in try fields.text(key) }
        dtype = try fields.word("dtype", elementTypes)
        shape = try fields.shape("shape")
    }
}

extension Manifest.TensorError {
    fileprivate init(_ fields: Fields) throws {
        name = try fields.text("name")
        bits = try fields.integer("bits", 1...16)
        blockSize = try fields.optional("block_size") { fields, key in try fields.count(key) }
        symmetric = try fields.flag("symmetric")
        relativeRms = try fields.figure("relative_rms")
        maxAbs = try fields.figure("max_abs")
    }
}

extension Manifest.QuantizationSummary {
    fileprivate init(_ fields: Fields) throws {
        worst = try fields.text("worst")
        worstRelativeRms = try fields.figure("worst_relative_rms")
        meanRelativeRms = try fields.figure("mean_relative_rms")
    }
}

extension Manifest.TokenizedText {
    fileprivate init(_ fields: Fields) throws {
        text = try fields.anyText("text")
        ids = try fields.ids("ids")
    }
}

extension Manifest.CoreMLProgram {
    fileprivate init(_ fields: Fields) throws {
        specificationVersion = try fields.count("specification_version")
        minimumSystem = try fields.word("minimum_system", ["iOS17", "iOS18"])
        computeUnits = try fields.word("compute_units", ["all", "cpuAndGPU", "cpuAndNeuralEngine"])
        functions = try fields.objects("functions", atLeast: 1, Manifest.CoreMLFunction.init)
        parts = try fields.objects("parts", Manifest.CoreMLPart.init)
    }
}

extension Manifest.CoreMLFunction {
    fileprivate init(_ fields: Fields) throws {
        name = try fields.word("name", ["prefill", "decode"])
        package = try fields.path("package")
        function = try fields.text("function")
        tokens = try fields.count("tokens")
        inputs = try fields.objects("inputs", atLeast: 1, Manifest.TensorValue.init)
        outputs = try fields.objects("outputs", atLeast: 1, Manifest.TensorValue.init)
    }
}

extension Manifest.CoreMLPart {
    fileprivate init(_ fields: Fields) throws {
        name = try fields.text("name")
        bytes = try fields.integer("bytes", 0...mostBytes)
        unit = try fields.word("unit", ["cpu", "gpu", "neural_engine"])
        reason = try fields.text("reason")
    }
}

extension Manifest.GoldenEntry {
    fileprivate init(_ fields: Fields) throws {
        file = try fields.path("file")
        positions = try fields.count("positions")
        prompts = try fields.objects("prompts", atLeast: 1, Manifest.TokenizedText.init)
    }
}
