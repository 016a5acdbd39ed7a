// swift-tools-version: 6.0
import PackageDescription


let package = Package(
    name: "PIT",
    platforms: [.iOS(.v17), .macOS(.v14)],
    products: [
        .library(name: "PITCore", targets: ["PITCore"]),
        .library(name: "PITCoreML", targets: ["PITCoreML"]),
    ],
    targets: [
        .target(name: "PITCore"),
        .target(name: "PITCoreML", dependencies: ["PITCore"]),
        .testTarget(name: "PITCoreTests", dependencies: ["PITCore"]),
    ]
)
