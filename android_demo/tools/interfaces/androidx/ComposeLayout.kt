// Signatures only; see the README of this folder.
package androidx.compose.foundation.layout

import androidx.compose.runtime.Composable
import androidx.compose.ui.Modifier
import androidx.compose.ui.unit.Dp

interface ColumnScope {
    fun Modifier.weight(weight: Float): Modifier
}

interface RowScope

@Composable
inline fun Column(modifier: Modifier = Modifier, content: @Composable ColumnScope.() -> Unit): Unit = throw UnsupportedOperationException()

@Composable
inline fun Row(modifier: Modifier = Modifier, content: @Composable RowScope.() -> Unit): Unit = throw UnsupportedOperationException()

fun Modifier.fillMaxSize(): Modifier = throw UnsupportedOperationException()

fun Modifier.fillMaxWidth(): Modifier = throw UnsupportedOperationException()

fun Modifier.padding(all: Dp): Modifier = throw UnsupportedOperationException()

fun Modifier.imePadding(): Modifier = throw UnsupportedOperationException()

fun Modifier.systemBarsPadding(): Modifier = throw UnsupportedOperationException()
