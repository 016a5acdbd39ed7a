package org.pitdeploy.core

/** Base of all errors that a user can meet: the message is one sentence that says what to do next. */
abstract class PitError(message: String, cause: Throwable? = null) : Exception(message, cause)

/** Something that was given cannot be used. */
class InputError(message: String, cause: Throwable? = null) : PitError(message, cause)

/** A bundle cannot be used; [kind] is the same word in every language that reads bundles (docs/bundle.md). */
class BundleError(val kind: String, message: String) : PitError(message)

/** More tokens were asked for than the cache holds. Thrown before anything runs. */
class ContextFullError(val used: Int, val needed: Int, val contextLength: Int) :
    PitError(
        "The context is full: $used tokens are in the cache and $needed more were asked for, but the model holds " +
            "$contextLength; start a new chat or shorten the message.",
    )

/** The runtime could not open a model, or failed in it. [reason] says why, for the app to act on. */
class ModelError(val reason: Reason, message: String, cause: Throwable? = null) : PitError(message, cause) {
    enum class Reason { UNSUPPORTED_OPERATORS, UNSUPPORTED_VERSION, DAMAGED_MODEL, OUT_OF_MEMORY, OTHER }
}
