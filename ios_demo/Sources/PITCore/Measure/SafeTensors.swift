import Foundation

/// The tensors of a .safetensors file: a header of JSON, then their bytes, little-endian.
struct SafeTensors {
    struct Entry {
        let dtype: String
        let shape: [Int]
        let range: Range<Int>
    }

    private let data: Data
    private let entries: [String: Entry]
    private let file: String

    private static let widths = ["F64": 8, "F32": 4, "I64": 8, "I32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1, "BOOL": 1]

    init(_ data: Data, file: String) throws {
        let fault = { (reason: String) in
            PITError.bundle(kind: .badValue, "\(file) cannot be read: \(reason); \(fetchAgain)")
        }
        guard data.count >= 8 else { throw fault("it is shorter than its header") }
        let length = data.prefix(8).reversed().reduce(UInt64(0)) { $0 << 8 | UInt64($1) }
        guard length <= UInt64(data.count - 8) else { throw fault("its header says \(length) bytes, and the file is shorter") }
        let start = 8 + Int(length)
        let header = try parseJSON(data.subdata(in: data.startIndex + 8..<data.startIndex + start), file: file)
        guard let object = header.object else { throw fault("its header is no object") }
        var entries: [String: Entry] = [:]
        for (name, value) in zip(object.keys, object.values) where name != "__metadata__" {
            guard let dtype = value["dtype"]?.string, let width = Self.widths[dtype],
                let shape = value["shape"]?.array?.compactMap(\.integer), shape.allSatisfy({ (0...1 << 31).contains($0) }),
                let offsets = value["data_offsets"]?.array?.compactMap(\.integer), offsets.count == 2,
                0 <= offsets[0], offsets[0] <= offsets[1], offsets[1] <= data.count - start
            else { throw fault("the tensor \(shown(name)) does not fit the file") }
            let bytes = shape.reduce((partialValue: width, overflow: false)) { size, dimension in
                let next = size.partialValue.multipliedReportingOverflow(by: dimension)
                return (next.partialValue, size.overflow || next.overflow)
            }
            guard !bytes.overflow, bytes.partialValue == offsets[1] - offsets[0] else {
                throw fault("the tensor \(shown(name)) has \(offsets[1] - offsets[0]) bytes, and its shape asks for others")
            }
            entries[name] = Entry(dtype: dtype, shape: shape, range: start + offsets[0]..<start + offsets[1])
        }
        (self.data, self.entries, self.file) = (data, entries, file)
    }

    func shape(_ name: String) throws -> [Int] { try entry(name, nil).shape }

    func floats(_ name: String) throws -> [Float] {
        try values(name, "F32", UInt32.self).map { Float(bitPattern: $0) }
    }

    func doubles(_ name: String) throws -> [Double] {
        try values(name, "F64", UInt64.self).map { Double(bitPattern: $0) }
    }

    func integers(_ name: String) throws -> [Int] {
        try values(name, "I32", UInt32.self).map { Int(Int32(bitPattern: $0)) }
    }

    private func entry(_ name: String, _ dtype: String?) throws -> Entry {
        guard let entry = entries[name], dtype == nil || dtype == entry.dtype else {
            throw PITError.bundle(kind: .badValue, "\(file) has no tensor \(name) of the type \(dtype ?? "asked for"); \(fetchAgain)")
        }
        return entry
    }

    private func values<Word: FixedWidthInteger>(_ name: String, _ dtype: String, _ word: Word.Type) throws -> [Word] {
        let range = try entry(name, dtype).range
        let width = MemoryLayout<Word>.size
        return data.withUnsafeBytes { bytes in
            stride(from: range.lowerBound, to: range.upperBound, by: width).map {
                Word(littleEndian: bytes.loadUnaligned(fromByteOffset: $0, as: Word.self))
            }
        }
    }
}
