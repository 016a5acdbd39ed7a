// A stand-in for the queue of Apple's Dispatch that is an executor: see README.md. It is compiled into the module that
// needs it.
import Dispatch

final class DispatchSerialQueue: SerialExecutor, Sendable {
    init(label: String, qos: DispatchQoS) { fatalError("a stand-in") }
    func enqueue(_ job: consuming ExecutorJob) { fatalError("a stand-in") }
    func asUnownedSerialExecutor() -> UnownedSerialExecutor { fatalError("a stand-in") }
}
