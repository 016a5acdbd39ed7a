// Signatures only; see the README of this folder.
package androidx.compose.foundation.lazy

import androidx.compose.runtime.Composable
import androidx.compose.ui.Modifier

class LazyListState {
    suspend fun scrollToItem(index: Int): Unit = throw UnsupportedOperationException()
}

interface LazyListScope

interface LazyItemScope

@Composable
fun rememberLazyListState(): LazyListState = throw UnsupportedOperationException()

@Composable
fun LazyColumn(modifier: Modifier = Modifier, state: LazyListState? = null, content: LazyListScope.() -> Unit): Unit =
    throw UnsupportedOperationException()

fun <T> LazyListScope.items(items: List<T>, itemContent: @Composable LazyItemScope.(T) -> Unit): Unit =
    throw UnsupportedOperationException()
