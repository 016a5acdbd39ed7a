// swift-tools-version: 6.0
import PackageDescription

// ExecuTorch's own Swift package; its prebuilt frameworks are downloaded by Xcode. It is a package apart, so that
// PITCore and PITCoreML need nothing of others.
let package = Package(
    name: "PITExecuTorch",
    platforms: [.iOS(.v17), .macOS(.v14)],
    products: [.library(name: "PITExecuTorch", targets: ["PITExecuTorch"])],
    dependencies: [
        .package(name: "PIT", path: ".."),
        .package(url: "https://github.com/pytorch/executorch.git", branch: "swiftpm-1.4.1"),
    ],
    targets: [
        .target(
            name: "PITExecuTorch",
            dependencies: [
                .product(name: "PITCore", package: "PIT"),
                .product(name: "executorch", package: "executorch"),
                .product(name: "backend_xnnpack", package: "executorch"),
                .product(name: "kernels_llm", package: "executorch"),
                .product(name: "kernels_optimized", package: "executorch"),
                .product(name: "kernels_quantized", package: "executorch"),
            ])
    ]
)
