// Signatures only; see the README of this folder.
package androidx.compose.runtime

import kotlin.reflect.KProperty

@Target(AnnotationTarget.FUNCTION, AnnotationTarget.TYPE, AnnotationTarget.TYPE_PARAMETER, AnnotationTarget.PROPERTY_GETTER)
annotation class Composable

interface State<out T> {
    val value: T
}

interface MutableState<T> : State<T> {
    override var value: T
}

fun <T> mutableStateOf(value: T): MutableState<T> = throw UnsupportedOperationException()

operator fun <T> State<T>.getValue(thisObj: Any?, property: KProperty<*>): T = value

operator fun <T> MutableState<T>.setValue(thisObj: Any?, property: KProperty<*>, value: T) {
    this.value = value
}

@Composable
fun <T> remember(calculation: () -> T): T = throw UnsupportedOperationException()

@Composable
fun LaunchedEffect(key1: Any?, key2: Any?, block: suspend () -> Unit): Unit = throw UnsupportedOperationException()
