import XCTest

@testable import PITCore

final class TextTests: XCTestCase {
    private func parse(_ text: String) throws -> JSONValue { try JSONParser.parse(Data(text.utf8)) }

    func testJSON() throws {
        let text = #"{"b": [1, -2.5, 1e3, true, false, null], "a": "é\n\u00e9\ud83d\ude42\"\\/", "\u00e9": {}, "e\u0301": []}"#
        let value = try parse(text)
        XCTAssertEqual(value.object?.keys.count, 4, "composed and decomposed names are two")
        XCTAssertEqual(value["b"], .array([.integer(1), .number(-2.5), .number(1000), .bool(true), .bool(false), .null]))
        XCTAssertEqual(value["a"]?.string.map(ExactString.init), ExactString("é\né🙂\"\\/"))
        XCTAssertEqual(try parse(jsonText(value)), value)
        XCTAssertEqual(try parse(jsonText(value, indent: 2)), value)
        XCTAssertEqual(try parse("9223372036854775808"), .integer(Int.max))
        XCTAssertEqual(jsonText(.string("\u{1}\u{7f}\u{2028}")), "\"\\u0001\u{7f}\u{2028}\"")
    }

    func testWhatIsNoJSON() {
        let wrong = [
            "", " ", "{", "[1,", "[1 2]", "{\"a\" 1}", "{\"a\": 1, \"a\": 2}", "{\"a\": 1,}", "[1,]", "NaN", "Infinity",
            "-", "01", "1.", ".5", "1e", "1e999", "\"\u{1}\"", "\"\\x\"", "\"\\ud800\"", "\"\\udc00\\ud800\"", "\"a", "tru",
            "1 2", "{1: 2}", String(repeating: "[", count: 100_000), "\"\\u00e\"", "'a'",
        ]
        for text in wrong { XCTAssertThrowsError(try parse(text), text.prefix(40).description) }
        XCTAssertThrowsError(try JSONParser.parse(Data([0x22, 0xff, 0x22])))
        do {
            _ = try parse("{\n \"a\": 1,\n \"b\": x}")
            XCTFail("no error")
        } catch {
            let fault = error as? JSONFault
            XCTAssertEqual(fault?.line, 3)
            XCTAssertEqual(fault?.column, 7)
        }
    }

    func testExactStrings() {
        XCTAssertNotEqual(ExactString("\u{e9}"), ExactString("e\u{301}"))
        XCTAssertEqual(ExactString("a" + "b").hashValue, ExactString("ab").hashValue)
        XCTAssertEqual(Set([ExactString("\u{e9}"), ExactString("e\u{301}"), ExactString("\u{e9}")]).count, 2)
    }

    func testHeap() {
        var heap = Heap<Int>(by: <)
        for number in [5, 3, 8, 1, 9, 2, 3] { heap.push(number) }
        var sorted: [Int] = []
        while let number = heap.pop() { sorted.append(number) }
        XCTAssertEqual(sorted, [1, 2, 3, 3, 5, 8, 9])
        XCTAssertNil(heap.first)
    }
}
