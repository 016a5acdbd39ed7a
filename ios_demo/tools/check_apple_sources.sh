#!/bin/bash
# What can be checked without Apple's frameworks of the sources that need them:
#   1. every file is parsed by the compiler;
#   2. PITCoreML, PITExecuTorch and the parts of the app without SwiftUI are type-checked in Swift 6 mode against
#      Tests/AppleStubs, declarations written by hand after Apple's documentation.
# SwiftUI views and tests that need XCTMetric are only parsed. Nothing here runs.
set -eu

tools=$(cd "$(dirname "$0")" && pwd)
demo=$(dirname "$tools")
repository=$(dirname "$demo")
out=$repository/build/ios_stubs
mkdir -p "$out"
cd "$demo"

swiftc() { TOOL=swiftc "$tools/swift.sh" "$@"; }
strict=(-swift-version 6 -strict-concurrency=complete -warnings-as-errors)
typecheck=(-typecheck "${strict[@]}" -I ../build/ios_stubs)
module() {  # module NAME FILES...: a module of declarations
  local name=$1
  shift
  swiftc "${strict[@]}" -emit-module -module-name "$name" -I ../build/ios_stubs \
    -emit-module-path "../build/ios_stubs/$name.swiftmodule" -parse-as-library "$@"
}

swiftc -parse App/*.swift AppTests/*.swift Sources/PITCoreML/*.swift ExecuTorch/Sources/PITExecuTorch/*.swift
echo "parsed: App, AppTests, PITCoreML, PITExecuTorch"

module CoreML Tests/AppleStubs/CoreML/CoreML.swift
module ExecuTorch Tests/AppleStubs/ExecuTorch/ExecuTorch.swift
module PITCore $(find Sources/PITCore -name '*.swift')
module PITCoreML Sources/PITCoreML/*.swift Tests/AppleStubs/Dispatch.swift
module PITExecuTorch ExecuTorch/Sources/PITExecuTorch/*.swift Tests/AppleStubs/Dispatch.swift
echo "type-checked: PITCoreML, PITExecuTorch"
swiftc "${typecheck[@]}" -module-name PITDemo App/AppModel.swift App/ChatModel.swift App/Device.swift App/Measurements.swift \
  Tests/AppleStubs/URL.swift
echo "type-checked: AppModel, ChatModel, Device, Measurements"
