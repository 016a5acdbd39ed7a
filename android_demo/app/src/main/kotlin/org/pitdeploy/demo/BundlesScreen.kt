package org.pitdeploy.demo

import androidx.compose.foundation.layout.Column
import androidx.compose.foundation.layout.Row
import androidx.compose.foundation.layout.fillMaxSize
import androidx.compose.foundation.layout.fillMaxWidth
import androidx.compose.foundation.layout.padding
import androidx.compose.foundation.lazy.LazyColumn
import androidx.compose.foundation.lazy.items
import androidx.compose.material3.Button
import androidx.compose.material3.MaterialTheme
import androidx.compose.material3.Text
import androidx.compose.material3.TextButton
import androidx.compose.runtime.Composable
import androidx.compose.ui.Modifier
import androidx.compose.ui.unit.dp
import org.pitdeploy.core.Bundle

private const val NONE = "There is no bundle yet. Copy the folder that pit-deploy export wrote onto the phone and pick it here."

/** Bundles in the app's storage; a new one is copied in, with every byte checked. */
@Composable
fun BundlesScreen(app: AppModel, onPick: () -> Unit) {
    Column(modifier = Modifier.fillMaxSize().padding(8.dp)) {
        Button(onClick = onPick, enabled = app.busy == null) { Text("Import a bundle from a folder") }
        if (app.bundles.isEmpty()) Text(NONE)
        LazyColumn(modifier = Modifier.weight(1f)) {
            items(app.bundles) { bundle -> BundleView(bundle, app) }
        }
    }
}

@Composable
private fun BundleView(bundle: Bundle, app: AppModel) {
    val manifest = bundle.manifest
    Column(modifier = Modifier.fillMaxWidth().padding(4.dp)) {
        Text(manifest.sourceName)
        Text(
            "${manifest.runtime}, ${manifest.precision}, context ${manifest.contextLength}, ${bundle.totalBytes / 1_000_000} MB",
            style = MaterialTheme.typography.labelMedium,
        )
        Row {
            Button(onClick = { app.open(bundle) }, enabled = app.busy == null) { Text("Open") }
            TextButton(onClick = { app.remove(bundle) }, enabled = app.busy == null) { Text("Remove") }
        }
    }
}
