package org.pitdeploy.demo

import androidx.compose.foundation.layout.Column
import androidx.compose.foundation.layout.Row
import androidx.compose.foundation.layout.fillMaxSize
import androidx.compose.foundation.layout.fillMaxWidth
import androidx.compose.foundation.layout.padding
import androidx.compose.foundation.lazy.LazyColumn
import androidx.compose.foundation.lazy.items
import androidx.compose.foundation.lazy.rememberLazyListState
import androidx.compose.material3.Button
import androidx.compose.material3.MaterialTheme
import androidx.compose.material3.OutlinedTextField
import androidx.compose.material3.Text
import androidx.compose.material3.TextButton
import androidx.compose.runtime.Composable
import androidx.compose.runtime.LaunchedEffect
import androidx.compose.ui.Modifier
import androidx.compose.ui.unit.dp
import org.pitdeploy.core.Message

@Composable
fun ChatScreen(app: AppModel) {
    val chat = app.chat
    Column(modifier = Modifier.fillMaxSize().padding(8.dp)) {
        Text(chat.model ?: "No model is open. Import a bundle under Bundles.", style = MaterialTheme.typography.labelMedium)
        if (chat.contextLength > 0) {
            val speed = if (chat.tokensPerSecond > 0) ", ${chat.tokensPerSecond.toInt()} tokens a second" else ""
            Text("${chat.used} of ${chat.contextLength} tokens of the context$speed", style = MaterialTheme.typography.labelMedium)
        }
        val shown = if (chat.running) chat.messages + Message("assistant", chat.partial) else chat.messages
        val list = rememberLazyListState()
        LaunchedEffect(shown.size, chat.partial.length / 64) {
            if (shown.isNotEmpty()) list.scrollToItem(shown.size - 1)
        }
        LazyColumn(state = list, modifier = Modifier.weight(1f).fillMaxWidth()) {
            items(shown) { message -> MessageView(message) }
        }
        Notice(
            chat.error,
            onDismiss = app::dismiss,
            action = if (chat.offerNewChat) "New chat" else null,
            onAction = { app.newChat() },
        )
        OutlinedTextField(
            value = chat.draft,
            onValueChange = app::setDraft,
            enabled = !chat.running,
            label = { Text("Message") },
            modifier = Modifier.fillMaxWidth(),
        )
        Row(modifier = Modifier.fillMaxWidth()) {
            if (chat.running) {
                Button(onClick = { app.stop() }) { Text("Stop") }
            } else {
                Button(onClick = { app.send() }, enabled = chat.draft.isNotBlank() && app.busy == null) { Text("Send") }
                TextButton(onClick = { app.newChat() }, enabled = chat.messages.isNotEmpty()) { Text("New chat") }
            }
        }
    }
}

@Composable
private fun MessageView(message: Message) {
    Column(modifier = Modifier.fillMaxWidth().padding(4.dp)) {
        Text(message.role, style = MaterialTheme.typography.labelMedium)
        Text(message.content)
    }
}
