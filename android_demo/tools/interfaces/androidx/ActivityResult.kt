// Signatures only; see the README of this folder.
package androidx.activity.result

abstract class ActivityResultLauncher<I> {
    abstract fun launch(input: I)
}
