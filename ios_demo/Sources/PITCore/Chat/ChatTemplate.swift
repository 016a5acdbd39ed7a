import Foundation

public struct ChatMessage: Sendable, Equatable {
    public enum Role: String, Sendable {
        case system, user, assistant
    }

    public let role: Role
    public var content: String

    public init(_ role: Role, _ content: String) { (self.role, self.content) = (role, content) }
}

/// The chat template of a bundle: someone else's program, which sees plain data only. Rendered as transformers renders it.
public struct ChatTemplate: Sendable {
    private let nodes: [JinjaNode]
    private let variables: JSONObject

    /// Read a template; throws `PITError.template` where it cannot be read. `variables` are what else it may read, such
    /// as `bos_token`.
    public init(_ source: String, variables: JSONObject = JSONObject()) throws {
        nodes = try JinjaParser.parse(source)
        self.variables = variables
    }

    /// The template of a bundle: chat_template.jinja, else the (default) one in tokenizer_config.json. Nil where the
    /// bundle has none.
    public init?(_ bundle: PITBundle) throws {
        guard bundle.manifest.chatTemplate else { return nil }
        let config = try bundle.json("tokenizer_config.json")
        let named = config["chat_template"]?.array?.first { $0["name"]?.string == "default" }?["template"]
        guard let source = try bundle.text("chat_template.jinja") ?? config["chat_template"]?.string ?? named?.string else {
            throw PITError.template(
                "The manifest says that \(bundle.url.lastPathComponent) has a chat template, and neither "
                    + "chat_template.jinja nor tokenizer_config.json has a default one; \(fetchAgain)")
        }
        try self.init(source, variables: Self.specialTokens(config))
    }

    /// The variables `bos_token`, `eos_token` and so on, from tokenizer_config.json.
    static func specialTokens(_ config: JSONObject) -> JSONObject {
        var tokens = JSONObject()
        for (name, value) in zip(config.keys, config.values) where name.hasSuffix("_token") {
            if let text = value.string ?? value["content"]?.string { tokens.set(name, .string(text)) }
        }
        return tokens
    }

    public func render(_ messages: [ChatMessage], addGenerationPrompt: Bool = true, now: Date = Date()) throws -> String {
        let list = messages.map { message in
            JSONValue.object(JSONObject([("role", .string(message.role.rawValue)), ("content", .string(message.content))]))
        }
        return try render(list, addGenerationPrompt: addGenerationPrompt, now: now)
    }

    /// Messages with whatever fields a template reads.
    public func render(
        _ messages: [JSONValue], addGenerationPrompt: Bool = true, variables more: JSONObject = JSONObject(),
        now: Date = Date()
    ) throws -> String {
        guard !messages.isEmpty, messages.allSatisfy({ $0["role"]?.string != nil }) else {
            throw PITError.input("A chat takes at least one message, each with a role and content.")
        }
        var given: [String: JinjaValue] = [
            "messages": JinjaValue(.array(messages)), "add_generation_prompt": .bool(addGenerationPrompt),
            "tools": .none, "documents": .none,
        ]
        for set in [variables, more] {
            for (name, value) in zip(set.keys, set.values) { given[name] = JinjaValue(value) }
        }
        return try JinjaInterpreter.render(nodes, given, now: now)
    }
}
