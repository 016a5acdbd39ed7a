package org.pitdeploy.core

import org.pitdeploy.core.tokenizer.TextStream

/** An answer and how it came about. */
class Reply(val text: String, val generation: Generation)

/**
 * A conversation with a model. What the cache holds of it is not computed again: the longest common start of the cached
 * ids and the new prompt stays.
 *
 * A turn that fails changes nothing: [messages] stay as they were, and the cache is put right by the next turn.
 */
class Chat(private val model: LoadedModel, system: String? = null, private val options: SamplingOptions = model.options) {
    private val said = ArrayList<Message>()
    private var cached = IntArray(0)

    init {
        if (!system.isNullOrBlank()) said.add(Message("system", system))
        model.backend.rewind(0)
    }

    val messages: List<Message> get() = said.toList()

    /** Goes on with a conversation that was had before, with this model or another. */
    fun restore(messages: List<Message>) {
        said.clear()
        said.addAll(messages)
        forget()
    }

    /** Tokens of the context that are taken. */
    val position: Int get() = model.backend.position

    /**
     * Appends a message and the answer to it. [onText] gets each new piece and returns false to stop.
     *
     * Throws [ContextFullError] before anything runs where the conversation does not fit, and [InputError] for an empty
     * message. An answer that filled the context has the reason CONTEXT_FULL.
     */
    fun reply(text: String, maxNewTokens: Int, onText: (String) -> Boolean = { true }): Reply {
        if (text.isBlank()) throw InputError("The message is empty; write something.")
        val backend = model.backend
        val asked = said + Message("user", text)
        val prompt = encode(asked)
        if (prompt.size > backend.contextLength) throw ContextFullError(0, prompt.size, backend.contextLength)
        var common = 0
        // The last id of the prompt runs in any case: its logits are wanted.
        while (common < minOf(cached.size, prompt.size - 1) && cached[common] == prompt[common]) common++
        backend.rewind(common)
        cached = prompt.copyOf(common)
        val stream = TextStream(model.tokenizer)
        val answer = StringBuilder()

        fun emit(piece: String): Boolean {
            answer.append(piece)
            return piece.isEmpty() || onText(piece)
        }

        val generation = try {
            val new = prompt.copyOfRange(common, prompt.size)
            generate(backend, new, maxNewTokens, options, model.bundle.manifest.endIds, prompt.take(common)) { emit(stream.push(it)) }
        } catch (error: RuntimeException) {
            forget()
            throw error
        } catch (error: PitError) {
            forget()
            throw error
        }
        emit(stream.finish())
        cached = (prompt + generation.ids).copyOf(backend.position)
        said.add(asked.last())
        said.add(Message("assistant", answer.toString()))
        return Reply(answer.toString(), generation)
    }

    /** Nothing of a failed turn stays in the cache. */
    private fun forget() {
        cached = IntArray(0)
        model.backend.rewind(0)
    }

    private fun encode(messages: List<Message>): IntArray {
        val template = model.template
        // Without a template a text is continued, and begins as the tokenizer says.
        if (template == null) return model.tokenizer.encode(messages.joinToString("\n") { it.content }, addSpecialTokens = true)
        return model.tokenizer.encode(template.render(messages))
    }
}
