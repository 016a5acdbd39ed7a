package org.pitdeploy.core

import java.nio.file.Path

/** What a chat screen shows. */
data class ChatState(
    val model: String? = null,
    val messages: List<Message> = emptyList(),
    /** The answer that is being written. */
    val partial: String = "",
    val running: Boolean = false,
    /** What stands in the input field; a message that could not be sent stays there. */
    val draft: String = "",
    /** One sentence, or null. */
    val error: String? = null,
    /** Whether to offer a new chat: this one is full. */
    val offerNewChat: Boolean = false,
    val used: Int = 0,
    val contextLength: Int = 0,
    val tokensPerSecond: Double = 0.0,
)

/**
 * The chat screen without a screen. Calls that take time ([openModel], [send]) belong on one worker thread; [stop] and
 * [setDraft] may come from any. Every change of the state is told to [onChange], on the thread that made it.
 */
class ChatController(private val holder: ModelHolder, private val onChange: (ChatState) -> Unit) {
    @Volatile
    var state = ChatState()
        private set

    @Volatile
    private var stopped = false
    private var chat: Chat? = null
    private var opened: Path? = null

    /**
     * Opens a model and starts a chat with it; the same bundle again goes on with its chat. Where it fails the chat of
     * before goes on, and the error is shown.
     */
    fun openModel(bundle: Bundle) {
        val said = if (bundle.path == opened) state.messages else emptyList()
        try {
            val model = holder.switchTo(bundle)
            chat = Chat(model).also { it.restore(said) }
            opened = bundle.path
            update {
                ChatState(
                    model = "${bundle.manifest.sourceName}, ${bundle.manifest.precision}",
                    messages = said,
                    draft = draft,
                    contextLength = model.backend.contextLength,
                )
            }
        } catch (error: PitError) {
            // The old model may have been opened again, with an empty cache: the messages are run again when the next one is sent.
            chat = holder.current?.let { old -> Chat(old).also { it.restore(state.messages) } }
            update { copy(error = error.message, model = if (holder.current == null) null else model) }
        }
    }

    /** Gives the model's memory back, for a benchmark that opens it itself; the messages stay readable. */
    fun closeModel() {
        holder.close()
        chat = null
        update { copy(model = null, used = 0) }
    }

    /** Something else ran in the model and emptied its cache: the messages are run again when the next one is sent. */
    fun cacheWasUsed() {
        chat?.let { it.restore(it.messages) }
        update { copy(used = 0) }
    }

    /** Empties the chat; the draft stays. */
    fun newChat() {
        chat = holder.current?.let { Chat(it) }
        update { ChatState(model = model, draft = draft, contextLength = contextLength) }
    }

    fun setDraft(text: String) = update { copy(draft = text) }

    fun dismissError() = update { copy(error = null) }

    fun stop() {
        stopped = true
    }

    /** Sends the draft. Where that fails the draft and all messages stay. */
    fun send(maxNewTokens: Int = MOST_TOKENS) {
        val text = state.draft
        val chat = this.chat
        if (chat == null) {
            update { copy(error = "No model is open; import a bundle and choose it.") }
            return
        }
        stopped = false
        update {
            val asked = chat.messages + Message("user", text)
            copy(running = true, partial = "", error = null, offerNewChat = false, messages = asked, draft = "")
        }
        try {
            val reply = chat.reply(text, maxNewTokens) { piece ->
                update { copy(partial = partial + piece) }
                !stopped
            }
            val full = reply.generation.reason == FinishReason.CONTEXT_FULL
            update {
                copy(
                    error = if (full) "The context of $contextLength tokens is full, so the answer ends here; start a new chat." else null,
                    offerNewChat = full,
                    tokensPerSecond = reply.generation.tokensPerSecond,
                )
            }
        } catch (error: ContextFullError) {
            update { copy(error = error.message, offerNewChat = true, draft = text) }
        } catch (error: PitError) {
            update { copy(error = error.message, draft = text) }
        } finally {
            update { copy(running = false, partial = "", messages = chat.messages, used = chat.position) }
        }
    }

    private fun update(change: ChatState.() -> ChatState) {
        synchronized(this) { state = state.change() }
        onChange(state)
    }

    companion object {
        const val MOST_TOKENS = 512
    }
}
