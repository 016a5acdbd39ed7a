import XCTest

@testable import PITCore

final class TemplateTests: XCTestCase {
    func testVectors() throws {
        let vectors = try Vectors.read("templates.json")
        let templates = try XCTUnwrap(vectors["templates"]?.object)
        let cases = try vectors.list("cases")
        XCTAssertGreaterThan(cases.count, 80)
        for vector in cases {
            let name = try vector.text("name")
            let source = try XCTUnwrap(templates[try vector.text("template")]?.string)
            let messages = try vector.list("messages")
            let add = try XCTUnwrap(vector.field("add_generation_prompt").bool)
            let variables = try XCTUnwrap(vector.field("variables").object)
            let render = {
                try ChatTemplate(source).render(messages, addGenerationPrompt: add, variables: variables)
            }
            if let text = try vector.field("expected")["text"]?.string {
                XCTAssertEqual(ExactString(try render()), ExactString(text), name)
            } else {
                guard case .template? = thrown({ _ = try render() }) else { return XCTFail(name) }
            }
        }
        for vector in try vectors.list("refused") {
            let template = try vector.text("template")
            let messages = try vector.list("messages")
            let variables = JSONObject([("bos_token", .string("<s>")), ("eos_token", .string("</s>"))])
            let error = thrown { _ = try ChatTemplate(template).render(messages, variables: variables) }
            guard case .template? = error else { return XCTFail(try vector.text("name")) }
        }
    }

    private func text(_ template: String, _ variables: [(String, JSONValue)] = []) throws -> String {
        try ChatTemplate(template).render([ChatMessage(.user, "Hi")].map { message in
            JSONValue.object(JSONObject([("role", .string("user")), ("content", .string(message.content))]))
        }, variables: JSONObject(variables), now: Date(timeIntervalSince1970: 1_000_000_000))
    }

    /// Expected texts are Jinja's own (3.1, with transformers' settings).
    func testConstructs() throws {
        let known = [
            ("{{ 7 / 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 2 ** 10 }} {{ 1.5 + 1 }}", "3.5 3 -4 2 1024 2.5"),
            ("{{ [1, 'a', none, true, {'k': 1.0}] }}", "[1, 'a', None, True, {'k': 1.0}]"),
            ("{{ {'b': [1, \"é\\n\"], 'a': none} | tojson }}", "{\"b\": [1, \"é\\n\"], \"a\": null}"),
            ("{{ [1, {'a': 2}] | tojson(indent=2) }}", "[\n  1,\n  {\n    \"a\": 2\n  }\n]"),
            ("{% for k, v in {'x': 1, 'y': 2}.items() %}{{ k }}={{ v }};{% endfor %}", "x=1;y=2;"),
            ("{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "02"),
            ("{% for i in [] %}x{% else %}none{% endfor %}", "none"),
            ("{% for a, a in [[1, 2]] %}{{ a }}{{ loop.revindex }}{% endfor %}", "21"),
            ("{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}", "A1"),
            ("{% set n = namespace(a=1) %}{% for i in range(3) %}{% set n.a = n.a + i %}{% endfor %}{{ n.a }}", "4"),
            ("{% set x = 1 %}{% for i in range(2) %}{% set x = 9 %}{% endfor %}{{ x }}", "1"),
            ("{% raw %}{{ x }}{% endraw %}!", "{{ x }}!"),
            ("{{ 'abcdef'[::-1] }}{{ 'abcdef'[1:4] }}{{ [1,2,3][-1] }}{{ 'abc'[-2:] }}", "fedcbabcd3bc"),
            ("{{ ' a b '.split() }}{{ 'a,b,c'.split(',', 1) }}{{ 'x'.join(['1', '2']) }}", "['a', 'b']['a', 'b,c']1x2"),
            ("{{ 'it''s' }}{{ \"it's\" | string }}{{ [\"it's\"] }}", "itsit's[\"it's\"]"),
            ("{{ messages | map(attribute='role') | list }}{{ missing | default('d') }}{{ '' | default('e', true) }}", "['user']de"),
            ("{{ 1 if false }}|{{ 'a' if 1 < 2 < 3 else 'b' }}", "|a"),
            ("{{ (1, 2) == [1, 2] }}", "True"),
            ("a\n  {%- if true %}\n b\n  {%- endif %}\n", "a b"),
            ("  {% if true %}\n  x\n  {% endif %}\n  y", "  x\n  y"),
            ("{% generation %}{{ 'g' }}{% endgeneration %}", "g"),
            ("{{ strftime_now('%Y, %b %m %B') }}", "2001, Sep 09 September"),
            ("{{ '%d' }}{{ 'é'|length }}{{ 'e\u{301}'|length }}", "%d12"),
            ("{{ ['b', 'A', 'c'] | sort | join }}{{ {'b': 1, 'a': 2} | dictsort }}", "Abc[['a', 2], ['b', 1]]"),
            ("{{ 'hello wORLD' | title }} {{ 'hELLO' | capitalize }} {{ ' x ' | trim }}", "Hello World Hello x"),
            ("{{ '5' | int + 1 }}{{ 'x' | int }}{{ 3.9 | int }}{{ '2.5' | float }}", "6032.5"),
            ("{{ 1 is number }}{{ 'a' is string }}{{ {} is mapping }}{{ [] is iterable }}{{ 3 is odd }}", "TrueTrueTrueTrueTrue"),
            ("{{ 'a' in 'cat' }}{{ 'k' in {'k': 1} }}{{ 4 not in [1, 2] }}", "TrueTrueTrue"),
            ("{{ messages[0].get('name', 'nobody') }}{{ messages[0].get('name') }}", "nobodyNone"),
        ]
        for (template, expected) in known { XCTAssertEqual(try text(template), expected, template) }
    }

    func testTheChatSeesPlainDataOnly() {
        let refused = [
            "{{ ''.__class__ }}", "{{ messages.append(1) }}", "{{ cycler() }}", "{{ 'a'.format(1) }}",
            "{% for i in range(1000000) %}{% endfor %}", "{{ 'x' * 100000000 }}",
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
            "{% for a in range(9999) %}{% set b = range(9999) %}{% endfor %}",
            "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "{{ ('a' * 60000) | replace('a', 'b' * 60000) }}",
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "{{" + String(repeating: "(", count: 5000), "{{ 1" + String(repeating: " + 1", count: 50_000) + " }}",
            "{{ 1" + String(repeating: " + 1", count: 300) + " }}", "{{ " + String(repeating: "not ", count: 400) + "1 }}",
            String(repeating: "{% if 1 %}", count: 500), "{{ 9223372036854775807 + 1 }}", "{{ 1 // 0 }}", "{{ 1 % 0.0 }}",
            "{{ -9223372036854775807 - 2 }}", "{{ nothing.field }}", "{% for a, b in [1] %}{% endfor %}",
        ]
        for template in refused {
            guard case .template? = thrown({ _ = try text(template) }) else { return XCTFail(template) }
        }
    }

    func testTheTemplateOfABundle() throws {
        let folder = try TemporaryFolder()
        let manifest = try String(
            contentsOf: Vectors.folder.appendingPathComponent("manifests/good_onnx.json"), encoding: .utf8)
        let config = #"{"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": [{"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"}]}"#
        try folder.write("tokenizer_config.json", Data(config.utf8))
        let listed = manifest.replacingOccurrences(
            of: #""path": "config.json""#, with: #""path": "tokenizer_config.json""#)
        try folder.write("manifest.json", Data(listed.utf8))
        let bundle = PITBundle(url: folder.url, manifest: try Manifest.parse(Data(listed.utf8)))
        XCTAssertEqual(try ChatTemplate(bundle)?.render([ChatMessage(.user, "Hi")]), bundle.manifest.chatTemplate ? "<s>Hi" : nil)
    }
}
