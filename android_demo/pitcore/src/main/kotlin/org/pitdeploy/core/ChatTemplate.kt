package org.pitdeploy.core

import org.pitdeploy.core.template.Template

/** One message of a chat; [role] is `system`, `user` or `assistant`. */
data class Message(val role: String, val content: String)

/** The chat template of a bundle, with the special tokens that it may read. */
class ChatTemplate(source: String, private val variables: Map<String, Any?>) {
    private val template = Template(source)

    /** The text that the template makes of [messages]; throws [InputError], one sentence. */
    fun render(messages: List<Message>, addGenerationPrompt: Boolean = true): String {
        if (messages.isEmpty()) throw InputError("A chat takes at least one message.")
        val values = messages.map { mapOf("role" to it.role, "content" to it.content) }
        return template.render(variables + mapOf("messages" to values, "add_generation_prompt" to addGenerationPrompt, "tools" to null))
    }

    companion object {
        /** chat_template.jinja, else the (default) one of tokenizer_config.json; null where the bundle has none. */
        fun of(bundle: Bundle): ChatTemplate? {
            val config = bundle.json("tokenizer_config.json")
            val source = if (bundle.has(FILE)) bundle.read(FILE).toString(Charsets.UTF_8) else inConfig(config["chat_template"])
            return source?.let { ChatTemplate(it, specialTokens(config)) }
        }

        /** `bos_token`, `eos_token` and so on, which are text or `{"content": text}`. */
        fun specialTokens(config: Map<String, Any?>): Map<String, String> {
            val named = config.filterKeys { it.endsWith("_token") }
            return named.mapNotNull { (name, value) ->
                ((if (value is Map<*, *>) value["content"] else value) as? String)?.let { name to it }
            }.toMap()
        }

        private fun inConfig(value: Any?): String? = when (value) {
            null -> null
            is String -> value
            is List<*> -> {
                val named = value.filterIsInstance<Map<*, *>>()
                named.firstOrNull { it["name"] == "default" }?.get("template") as? String
                    ?: throw InputError(
                        "None of the chat templates ${named.map { it["name"] }} is named 'default'; export the bundle with one.",
                    )
            }
            else -> throw InputError("chat_template in tokenizer_config.json must be text; export the bundle again.")
        }

        private const val FILE = "chat_template.jinja"
    }
}
