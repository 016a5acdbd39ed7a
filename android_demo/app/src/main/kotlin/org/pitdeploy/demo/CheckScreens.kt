package org.pitdeploy.demo

import androidx.compose.foundation.layout.Column
import androidx.compose.foundation.layout.fillMaxSize
import androidx.compose.foundation.layout.padding
import androidx.compose.foundation.rememberScrollState
import androidx.compose.foundation.verticalScroll
import androidx.compose.material3.Button
import androidx.compose.material3.MaterialTheme
import androidx.compose.material3.Text
import androidx.compose.runtime.Composable
import androidx.compose.ui.Modifier
import androidx.compose.ui.unit.dp
import java.util.Locale

private const val PARITY =
    "Runs the golden record of the open bundle and compares every position with the model as it was trained."
private const val BENCHMARK =
    "Measures the open bundle: load, prompts, tokens one by one. Let the phone lie still and cool; it takes a few minutes."

/** The bundle's golden record on this phone: what `pit-deploy verify` does on a computer. */
@Composable
fun ParityScreen(app: AppModel) {
    Column(modifier = Modifier.fillMaxSize().padding(8.dp).verticalScroll(rememberScrollState())) {
        Text(PARITY)
        Button(onClick = { app.checkParity() }, enabled = app.busy == null) { Text("Check") }
        val report = app.parity ?: return@Column
        Text(if (report.passed) "Passed" else "Out of tolerance", style = MaterialTheme.typography.titleMedium)
        Text("${report.rows.size} positions")
        Text("mean KL ${figure(report.meanKl)}, largest ${figure(report.worstKl)}")
        Text("top-1 ${figure(100 * report.top1)} %")
        Text("largest logit error ${figure(report.maxAbs)}")
        Text("greedy ${report.greedyEqual} of ${report.greedyTokens} tokens equal")
        report.failures.forEach { Text(it, color = MaterialTheme.colorScheme.error) }
    }
}

@Composable
fun BenchmarkScreen(app: AppModel) {
    Column(modifier = Modifier.fillMaxSize().padding(8.dp).verticalScroll(rememberScrollState())) {
        Text(BENCHMARK)
        Button(onClick = { app.benchmark() }, enabled = app.busy == null) { Text("Measure") }
        val report = app.bench ?: return@Column
        summary(report).forEach { Text(it) }
    }
}

private fun figure(value: Double): String = "%.3g".format(Locale.ROOT, value)

/** The medians of a bench object, a line each. */
internal fun summary(report: Map<String, Any?>): List<String> {
    fun maps(value: Any?) = (value as? List<*> ?: emptyList<Any?>()).filterIsInstance<Map<*, *>>()
    fun median(value: Any?) = (value as Map<*, *>)["median"] as Double
    val run = maps(maps(report["subjects"]).firstOrNull()?.get("runs")).firstOrNull() ?: return emptyList()
    val lines = ArrayList<String>()
    (run["error"] as String?)?.let { lines.add(it) }
    maps(run["prefill"]).forEach {
        lines.add("prompt of ${it["tokens"]}: ${figure(median(it["tokens_per_second"]))} tokens a second")
    }
    maps(run["decode"]).forEach {
        lines.add("decoding at depth ${it["depth"]}: ${figure(median(it["tokens_per_second"]))} tokens a second")
    }
    (run["memory"] as? Map<*, *>)?.let { lines.add("memory at most ${(median(it["peak_bytes"]) / 1e6).toInt()} MB") }
    return lines
}
