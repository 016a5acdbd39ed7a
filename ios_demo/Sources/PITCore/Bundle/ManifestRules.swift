extension Manifest {
    /// The rules between fields, step 5 of "How an app checks a bundle" (docs/bundle.md).
    func checkRules(_ file: String) throws {
        func failure(_ kind: BundleFault, _ field: String, _ reason: String) -> PITError {
            .bundle(kind: kind, "\(file): the field '\(field)' \(reason); \(fetchAgain)")
        }
        func checkIds(_ kind: BundleFault, _ field: String, _ ids: [Int]) throws {
            for id in ids where id >= tokenizerLength {
                throw failure(kind, field, "has \(id): it should be below the tokenizer's length, \(tokenizerLength)")
            }
        }
        func checkUnique(_ field: String, _ values: [String]) throws {
            var seen: Set<ExactString> = []
            for value in values where !seen.insert(ExactString(value)).inserted {
                throw failure(.badValue, field, "has \(shown(value)) twice")
            }
        }

        if tokenizerLength > vocabSize {
            throw failure(
                .badVocabulary, "tokenizer_length",
                "is \(tokenizerLength): the tokenizer has ids that the table of \(vocabSize) rows (vocab_size) lacks")
        }
        try checkIds(.badEndId, "end_ids", endIds)
        try checkUnique("end_ids", endIds.map(String.init))
        try checkIds(.badTokenId, "bos_id", bosId.map { [$0] } ?? [])
        for (place, check) in tokenizerChecks.enumerated() {
            try checkIds(.badTokenId, "tokenizer_checks.\(place).ids", check.ids)
        }
        for (place, prompt) in (golden?.prompts ?? []).enumerated() {
            try checkIds(.badTokenId, "golden.prompts.\(place).ids", prompt.ids)
        }
        let names = architecture.numHiddenLayers + 1
        if !hiddenStates.isEmpty && hiddenStates.count != names {
            throw failure(.badValue, "hidden_states", "has \(hiddenStates.count) names: it should be empty or have \(names)")
        }
        if (quantizationSummary == nil) != quantization.isEmpty {
            throw failure(.badValue, "quantization_summary", "should be null exactly where 'quantization' is empty")
        }
        if let summary = quantizationSummary, !quantization.contains(where: { $0.name.isExactly(summary.worst) }) {
            throw failure(.badValue, "quantization_summary.worst", "is not among the tensors of 'quantization'")
        }
        try checkUnique("quantization", quantization.map(\.name))
        if (coreml == nil) != (runtime != "coreml") {
            throw failure(.badValue, "coreml", "should be null exactly where 'runtime' is not 'coreml', and that is '\(runtime)'")
        }
        try checkUnique("files", files.map(\.path))
        if lists("manifest.json") { throw failure(.badValue, "files", "has manifest.json, which cannot list itself") }
        if !lists(modelFile) && !listsFolder(modelFile) {
            throw failure(.unlistedFile, "model_file", "is \(shown(modelFile)), which 'files' does not list")
        }
        for (place, function) in (coreml?.functions ?? []).enumerated() where !listsFolder(function.package) {
            throw failure(
                .unlistedFile, "coreml.functions.\(place).package",
                "is \(shown(function.package)), which is no folder of files in 'files'")
        }
        if let golden, !lists(golden.file) {
            throw failure(.unlistedFile, "golden.file", "is \(shown(golden.file)), which 'files' does not list")
        }
    }

    /// Whether the file is one of the bundle's.
    public func lists(_ path: String) -> Bool { files.contains { $0.path.isExactly(path) } }

    /// Whether it is a folder of files of the bundle.
    public func listsFolder(_ path: String) -> Bool {
        files.contains { $0.path.utf8.starts(with: (path + "/").utf8) }
    }
}
