// A stand-in for ExecuTorch's Swift module: see ../README.md.
import Foundation

public protocol Scalar {}
extension Int64: Scalar {}
extension Float: Scalar {}

public final class Tensor<T: Scalar> {
    public init(_ scalars: [T], shape: [Int]) { fatalError("a stand-in") }
    public var count: Int { fatalError("a stand-in") }
    public func withUnsafeBytes<R>(_ body: (UnsafeBufferPointer<T>) throws -> R) rethrows -> R { fatalError("a stand-in") }
}

public protocol ValueConvertible {
    func asValue() -> Value
}

extension Tensor: ValueConvertible {
    public func asValue() -> Value { fatalError("a stand-in") }
}

public final class Value: NSObject {
    public func tensor<T: Scalar>() -> Tensor<T>? { fatalError("a stand-in") }
}

public enum ModuleLoadMode: Int {
    case file, mmap, mmapUseMlock, mmapUseMlockIgnoreErrors
}

public final class Module: NSObject {
    public init(filePath: String, loadMode: ModuleLoadMode) { fatalError("a stand-in") }
    public func load(_ method: String) throws { fatalError("a stand-in") }
    public func forward(_ inputs: [any ValueConvertible]) throws -> [Value] { fatalError("a stand-in") }
}
