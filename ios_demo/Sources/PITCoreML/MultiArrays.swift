#if canImport(CoreML)
import CoreML
import Foundation
import PITCore

/// Multi-arrays of the types that our programs have: int32 in, float16 or float32 out.
enum MultiArrays {
    static func integers(_ values: [Int32], shape: [Int]) throws -> MLMultiArray {
        let array = try MLMultiArray(shape: shape.map { NSNumber(value: $0) }, dataType: .int32)
        array.withUnsafeMutableBytes { bytes, _ in
            _ = bytes.bindMemory(to: Int32.self).update(fromContentsOf: values)
        }
        return array
    }

    /// A cache before the first token.
    static func zeros(_ state: Manifest.TensorState) throws -> MLMultiArray {
        guard let shape = state.fixedShape, let type = dataType(state.dtype) else {
            throw PITError.bundle(
                kind: .badValue,
                "The state \(state.name) is of type \(state.dtype) or of a free shape, and this app cannot pass it; export "
                    + "the bundle again.")
        }
        let array = try MLMultiArray(shape: shape.map { NSNumber(value: $0) }, dataType: type)
        array.withUnsafeMutableBytes { bytes, _ in
            for place in bytes.indices { bytes[place] = 0 }
        }
        return array
    }

    private static func dataType(_ name: String) -> MLMultiArrayDataType? {
        switch name {
        case "float16": return .float16
        case "float32": return .float32
        default: return nil
        }
    }

    /// One row of logits [1, rows, columns] as float32. Core ML may lay rows out with gaps: strides are followed.
    static func row(_ array: MLMultiArray, call: FunctionCall, columns: Int) throws -> [Float] {
        let shape = array.shape.map(\.intValue)
        guard shape.count == 3, shape[0] == 1, shape[2] == columns else {
            throw PITError.runtime(
                "Core ML gives logits of shape \(shape), and the manifest says \(columns) columns; export the bundle again.")
        }
        let strides = array.strides.map(\.intValue)
        let start = call.row(of: shape[1]) * strides[1]
        let places = stride(from: start, to: start + columns * strides[2], by: strides[2])
        return try array.withUnsafeBytes { bytes in
            switch array.dataType {
            #if !(os(macOS) && arch(x86_64))  // Swift has no Float16 there
            case .float16:
                let values = bytes.bindMemory(to: Float16.self)
                return places.map { Float(values[$0]) }
            #endif
            case .float32:
                let values = bytes.bindMemory(to: Float.self)
                return places.map { values[$0] }
            default:
                throw PITError.runtime("Core ML gives logits of a type that this app does not read; export the bundle again.")
            }
        }
    }
}
#endif
