import Foundation
import PITCore

#if canImport(Darwin)
@preconcurrency import Darwin
#endif

/// What the device says of itself, for reports.
enum Device {
    /// Resident bytes of the app, now and at their peak; nil where the system does not tell.
    static var memory: (resident: Int, peak: Int)? {
        #if canImport(Darwin)
        var info = mach_task_basic_info()
        var count = mach_msg_type_number_t(MemoryLayout<mach_task_basic_info>.size / MemoryLayout<natural_t>.size)
        let status = withUnsafeMutablePointer(to: &info) { pointer in
            pointer.withMemoryRebound(to: integer_t.self, capacity: Int(count)) {
                task_info(mach_task_self_, task_flavor_t(MACH_TASK_BASIC_INFO), $0, &count)
            }
        }
        return status == KERN_SUCCESS ? (Int(info.resident_size), Int(info.resident_size_max)) : nil
        #else
        return nil
        #endif
    }

    static var machine: BenchReport.Machine {
        var system = utsname()
        uname(&system)
        let model = withUnsafeBytes(of: &system.machine) { bytes in
            String(decoding: bytes.prefix { $0 != 0 }, as: UTF8.self)
        }
        #if arch(arm64)
        let architecture = "arm64"
        #else
        let architecture = "x86_64"
        #endif
        return BenchReport.Machine(
            system: ProcessInfo.processInfo.operatingSystemVersionString, architecture: architecture,
            processor: model.isEmpty ? nil : model, cores: ProcessInfo.processInfo.activeProcessorCount,
            memoryBytes: Int(ProcessInfo.processInfo.physicalMemory))
    }

    /// A note where the device is hot, which makes figures worthless; nil where it is not.
    static var heatNote: String? {
        #if canImport(Darwin)
        switch ProcessInfo.processInfo.thermalState {
        case .serious, .critical: return "the device was hot: let it cool down and measure again"
        default: return nil
        }
        #else
        return nil
        #endif
    }
}
