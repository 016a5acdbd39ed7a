// Signatures only; see the README of this folder.
package androidx.compose.ui

interface Modifier {
    companion object : Modifier
}
