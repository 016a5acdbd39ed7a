// Signatures only; see the README of this folder.
package androidx.compose.material3

import androidx.compose.foundation.layout.RowScope
import androidx.compose.runtime.Composable
import androidx.compose.ui.Modifier

class Color

class TextStyle

class ColorScheme(val error: Color)

class Typography(val labelMedium: TextStyle, val titleMedium: TextStyle)

object MaterialTheme {
    val colorScheme: ColorScheme
        @Composable get() = throw UnsupportedOperationException()
    val typography: Typography
        @Composable get() = throw UnsupportedOperationException()
}

@Composable
fun MaterialTheme(content: @Composable () -> Unit): Unit = throw UnsupportedOperationException()

@Composable
fun Surface(modifier: Modifier = Modifier, content: @Composable () -> Unit): Unit = throw UnsupportedOperationException()

@Composable
fun Text(text: String, modifier: Modifier = Modifier, color: Color? = null, style: TextStyle? = null): Unit =
    throw UnsupportedOperationException()

@Composable
fun Button(onClick: () -> Unit, modifier: Modifier = Modifier, enabled: Boolean = true, content: @Composable RowScope.() -> Unit): Unit =
    throw UnsupportedOperationException()

@Composable
fun TextButton(onClick: () -> Unit, modifier: Modifier = Modifier, enabled: Boolean = true, content: @Composable RowScope.() -> Unit): Unit =
    throw UnsupportedOperationException()

@Composable
fun OutlinedTextField(
    value: String,
    onValueChange: (String) -> Unit,
    modifier: Modifier = Modifier,
    enabled: Boolean = true,
    label: (@Composable () -> Unit)? = null,
): Unit = throw UnsupportedOperationException()

@Composable
fun LinearProgressIndicator(progress: () -> Float, modifier: Modifier = Modifier): Unit = throw UnsupportedOperationException()
