// Signatures only; see the README of this folder.
package androidx.compose.foundation

import androidx.compose.runtime.Composable
import androidx.compose.ui.Modifier

class ScrollState

@Composable
fun rememberScrollState(): ScrollState = throw UnsupportedOperationException()

fun Modifier.verticalScroll(state: ScrollState): Modifier = throw UnsupportedOperationException()
