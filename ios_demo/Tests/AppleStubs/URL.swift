// A stand-in for what Apple's Foundation has beyond that of Linux: see README.md. It is compiled into the module that
// needs it.
import Foundation

extension URL {
    func startAccessingSecurityScopedResource() -> Bool { fatalError("a stand-in") }
    func stopAccessingSecurityScopedResource() { fatalError("a stand-in") }
}
