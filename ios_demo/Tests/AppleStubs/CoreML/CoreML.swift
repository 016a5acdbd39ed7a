// A stand-in for Apple's CoreML: see ../README.md.
import Foundation

public enum MLComputeUnits: Int, Sendable {
    case cpuOnly, cpuAndGPU, all, cpuAndNeuralEngine
}

public enum MLMultiArrayDataType: Int, Sendable {
    case double, float32, float16, int32
}

open class MLModelConfiguration: NSObject {
    public override init() { fatalError("a stand-in") }
    public var computeUnits: MLComputeUnits = .all
    public var functionName: String?
}

public final class MLMultiArray: NSObject {
    public init(shape: [NSNumber], dataType: MLMultiArrayDataType) throws { fatalError("a stand-in") }
    public var shape: [NSNumber] { fatalError("a stand-in") }
    public var strides: [NSNumber] { fatalError("a stand-in") }
    public var dataType: MLMultiArrayDataType { fatalError("a stand-in") }
    public func withUnsafeBytes<R>(_ body: (UnsafeRawBufferPointer) throws -> R) rethrows -> R { fatalError("a stand-in") }
    public func withUnsafeMutableBytes<R>(
        _ body: (UnsafeMutableRawBufferPointer, [Int]) throws -> R
    ) rethrows -> R { fatalError("a stand-in") }
}

public final class MLFeatureValue: NSObject {
    public init(multiArray value: MLMultiArray) { fatalError("a stand-in") }
    public var multiArrayValue: MLMultiArray? { fatalError("a stand-in") }
}

public protocol MLFeatureProvider {
    var featureNames: Set<String> { get }
    func featureValue(for featureName: String) -> MLFeatureValue?
}

public final class MLDictionaryFeatureProvider: NSObject, MLFeatureProvider {
    public init(dictionary: [String: Any]) throws { fatalError("a stand-in") }
    public var featureNames: Set<String> { fatalError("a stand-in") }
    public func featureValue(for featureName: String) -> MLFeatureValue? { fatalError("a stand-in") }
}

public final class MLState: NSObject, @unchecked Sendable {}

public final class MLModel: NSObject, @unchecked Sendable {
    public class func compileModel(at url: URL) async throws -> URL { fatalError("a stand-in") }
    public class func load(
        contentsOf url: URL, configuration: MLModelConfiguration = MLModelConfiguration()
    ) async throws -> MLModel { fatalError("a stand-in") }
    public func makeState() -> MLState { fatalError("a stand-in") }
    public func prediction(from input: any MLFeatureProvider) throws -> any MLFeatureProvider { fatalError("a stand-in") }
    public func prediction(
        from inputFeatures: any MLFeatureProvider, using state: MLState
    ) throws -> any MLFeatureProvider { fatalError("a stand-in") }
}
