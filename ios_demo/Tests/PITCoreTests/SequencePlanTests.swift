import XCTest

@testable import PITCore

final class SequencePlanTests: XCTestCase {
    /// How Python calls the functions of a Core ML program: function, padded ids, position, last token.
    func testVectors() throws {
        let vectors = try Vectors.read("coreml_calls.json")
        let manifests = try XCTUnwrap(vectors["manifests"]?.object)
        var plans: [String: SequencePlan] = [:]
        for (name, value) in zip(manifests.keys, manifests.values) {
            plans[name] = try SequencePlan(try Manifest.parse(Data(jsonText(value).utf8)))
        }
        let cases = try vectors.list("cases")
        XCTAssertGreaterThan(cases.count, 100)
        for vector in cases {
            let name = try vector.text("profile")
            let plan = try XCTUnwrap(plans[name])
            let position = try vector.whole("position")
            let calls = plan.calls(Array(1...(try vector.whole("tokens"))), position: position)
            let expected = try vector.list("calls")
            XCTAssertEqual(calls.count, expected.count, name)
            for (call, expected) in zip(calls, expected) {
                XCTAssertEqual(call.function.name, try expected.text("function"), name)
                XCTAssertEqual(call.ids.map(Int.init), try expected.field("input_ids").integers(), name)
                XCTAssertEqual(call.position, try expected.whole("position"), name)
                XCTAssertEqual(call.last, try expected.field("last").integer, name)
                XCTAssertEqual([call.real.lowerBound, call.real.upperBound], try expected.field("real").integers(), name)
                XCTAssertEqual(call.row(of: call.ids.count), call.ids.count > 1 ? call.real.upperBound - 1 : 0)
                XCTAssertEqual(call.row(of: 1), 0)
            }
            XCTAssertEqual(position + calls.reduce(0) { $0 + $1.real.count }, try vector.whole("position_after"))
        }
    }

    func testAProgramWithoutDecode() throws {
        let good = try Data(contentsOf: Vectors.folder.appendingPathComponent("manifests/good_onnx.json"))
        guard case .bundle(.badValue, _)? = thrown({ _ = try SequencePlan(try Manifest.parse(good)) }) else {
            return XCTFail("no error")
        }
    }
}
