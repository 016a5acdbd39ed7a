package org.pitdeploy.demo

import androidx.compose.foundation.layout.Column
import androidx.compose.foundation.layout.Row
import androidx.compose.foundation.layout.fillMaxSize
import androidx.compose.foundation.layout.fillMaxWidth
import androidx.compose.foundation.layout.imePadding
import androidx.compose.foundation.layout.padding
import androidx.compose.foundation.layout.systemBarsPadding
import androidx.compose.material3.Button
import androidx.compose.material3.LinearProgressIndicator
import androidx.compose.material3.MaterialTheme
import androidx.compose.material3.Surface
import androidx.compose.material3.Text
import androidx.compose.material3.TextButton
import androidx.compose.runtime.Composable
import androidx.compose.runtime.getValue
import androidx.compose.runtime.mutableStateOf
import androidx.compose.runtime.remember
import androidx.compose.runtime.setValue
import androidx.compose.ui.Modifier
import androidx.compose.ui.unit.dp

private enum class Tab(val title: String) { CHAT("Chat"), BUNDLES("Bundles"), PARITY("Parity"), BENCHMARK("Benchmark") }

/** The whole app: a row of tabs, what the worker does, and the screen that was chosen. */
@Composable
fun DemoScreen(app: AppModel, onPick: () -> Unit) {
    var tab by remember { mutableStateOf(Tab.CHAT) }
    MaterialTheme {
        Surface(modifier = Modifier.fillMaxSize()) {
            Column(modifier = Modifier.systemBarsPadding().imePadding()) {
                Row(modifier = Modifier.fillMaxWidth()) {
                    Tab.entries.forEach { entry -> TextButton(onClick = { tab = entry }, enabled = tab != entry) { Text(entry.title) } }
                }
                Work(app)
                Notice(app.notice, app::dismiss)
                when (tab) {
                    Tab.CHAT -> ChatScreen(app)
                    Tab.BUNDLES -> BundlesScreen(app, onPick)
                    Tab.PARITY -> ParityScreen(app)
                    Tab.BENCHMARK -> BenchmarkScreen(app)
                }
            }
        }
    }
}

@Composable
private fun Work(app: AppModel) {
    val what = app.busy ?: return
    val progress = app.progress
    Column(modifier = Modifier.fillMaxWidth().padding(8.dp)) {
        Text(what)
        LinearProgressIndicator(progress = { progress }, modifier = Modifier.fillMaxWidth())
        TextButton(onClick = { app.stop() }) { Text("Stop") }
    }
}

/** One sentence, until it is put away. */
@Composable
fun Notice(sentence: String?, onDismiss: () -> Unit, action: String? = null, onAction: () -> Unit = {}) {
    if (sentence == null) return
    Column(modifier = Modifier.fillMaxWidth().padding(8.dp)) {
        Text(sentence, color = MaterialTheme.colorScheme.error)
        Row {
            if (action != null) Button(onClick = onAction) { Text(action) }
            TextButton(onClick = onDismiss) { Text("Close") }
        }
    }
}
