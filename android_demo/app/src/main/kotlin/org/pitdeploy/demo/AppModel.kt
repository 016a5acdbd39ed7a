package org.pitdeploy.demo

import android.app.Application
import android.os.Handler
import android.os.Looper
import android.util.Log
import androidx.compose.runtime.getValue
import androidx.compose.runtime.mutableStateOf
import androidx.compose.runtime.setValue
import java.io.File
import java.nio.file.Paths
import java.util.concurrent.Executors
import org.pitdeploy.core.Automation
import org.pitdeploy.core.BenchReport
import org.pitdeploy.core.BenchSettings
import org.pitdeploy.core.Benchmark
import org.pitdeploy.core.Bundle
import org.pitdeploy.core.BundleImport
import org.pitdeploy.core.BundleSource
import org.pitdeploy.core.ChatController
import org.pitdeploy.core.ChatState
import org.pitdeploy.core.Gate
import org.pitdeploy.core.GoldenRecord
import org.pitdeploy.core.InputError
import org.pitdeploy.core.LoadedModel
import org.pitdeploy.core.ModelHolder
import org.pitdeploy.core.Parity
import org.pitdeploy.core.ParityReport
import org.pitdeploy.core.PitError
import org.pitdeploy.core.Task
import org.pitdeploy.runtime.Backends

/**
 * Everything that the screens show, and the one worker thread that runs models. It lives as long as the process, so that
 * turning the phone does not load the model again.
 */
class AppModel private constructor(application: Application) {
    private val device = Device(application)
    private val imported = File(application.filesDir, "bundles")
    private val external = application.getExternalFilesDir(null) ?: application.filesDir
    private val importer = BundleImport(Paths.get(imported.path))
    private val automation = Automation(Paths.get(imported.path), Paths.get(external.path))
    private val backends = Backends(device.threads())
    private val holder = ModelHolder(backends, device::availableBytes)
    private val worker = Executors.newSingleThreadExecutor()
    private val main = Handler(Looper.getMainLooper())
    private val controller: ChatController = ChatController(holder) { show() }

    var chat by mutableStateOf(ChatState())
        private set
    var bundles by mutableStateOf(emptyList<Bundle>())
        private set

    /** What the worker does, or null; [progress] is 0 to 1. */
    var busy by mutableStateOf<String?>(null)
        private set
    var progress by mutableStateOf(0f)
        private set

    /** One sentence that is not about the chat. */
    var notice by mutableStateOf<String?>(null)
        private set
    var parity by mutableStateOf<ParityReport?>(null)
        private set
    var bench by mutableStateOf<Map<String, Any?>?>(null)
        private set

    @Volatile
    private var cancelled = false

    /** The newest state, whichever thread made it: what was typed must be in the field before the next key. */
    private fun show() {
        if (Looper.myLooper() == Looper.getMainLooper()) chat = controller.state else main.post { chat = controller.state }
    }

    fun refresh() = work(null) { importer.list().let { found -> main.post { bundles = found } } }

    fun import(source: BundleSource) = work("Importing ${source.name}") {
        imported.mkdirs()
        val bundle = importer.run(source, imported.usableSpace, ::report)
        controller.openModel(bundle)
        refresh()
    }

    fun open(bundle: Bundle) = work("Opening ${bundle.manifest.sourceName}") { controller.openModel(bundle) }

    fun remove(bundle: Bundle) = work(null) {
        if (holder.current?.bundle?.path == bundle.path) throw InputError("This bundle is open; open another one before you remove it.")
        importer.remove(bundle)
        refresh()
    }

    fun setDraft(text: String) = controller.setDraft(text)

    fun send() = work(null) { controller.send() }

    fun stop() {
        cancelled = true
        controller.stop()
    }

    fun newChat() = work(null) { controller.newChat() }

    fun dismiss() {
        notice = null
        controller.dismissError()
    }

    fun checkParity() = work("Comparing with the golden record") {
        val model = holder.current ?: throw InputError("No model is open; import a bundle and choose it.")
        val report = parityOf(model)
        main.post { parity = report }
    }

    fun benchmark() = work("Measuring") {
        val bundle = holder.current?.bundle ?: throw InputError("No model is open; import a bundle and choose it.")
        controller.closeModel() // one model fits into memory, and the load is measured too
        try {
            val report = benchOf(bundle)
            automation.writeBench(report)
            main.post {
                bench = report
                notice = "The results are in ${File(external, Automation.BENCH)}."
            }
        } finally {
            controller.openModel(bundle)
        }
    }

    /** What a script asked for; results and errors go into files of the external folder. */
    fun run(task: Task) = work("Running ${task.bundle}") {
        automation.clear()
        try {
            val bundle = automation.find(task.bundle)
            if (task.bench) {
                controller.closeModel()
                val report = benchOf(bundle)
                automation.writeBench(report)
                main.post { bench = report }
            }
            if (task.parity || !task.bench) controller.openModel(bundle)
            if (task.parity) {
                val model = holder.current?.takeIf { it.bundle.path == bundle.path }
                    ?: throw InputError(controller.state.error ?: "The model could not be opened.")
                val report = parityOf(model)
                automation.writeParity(bundle, report)
                main.post { parity = report }
            }
            Log.i(TAG, "done: ${task.bundle}")
        } catch (error: PitError) {
            automation.writeError(task, error.message ?: error.toString())
            throw error
        }
    }

    private fun parityOf(model: LoadedModel): ParityReport {
        val manifest = model.bundle.manifest
        if (manifest.goldenFile == null) throw InputError("This bundle carries no golden record; export it again.")
        val golden = goldenOf(model.bundle)
        val gate = Gate.of(manifest)
        try {
            return Parity.check(golden, model.backend, gate, manifest.endIds) { done, total ->
                report(done.toLong(), total.toLong())
                !cancelled
            }
        } finally {
            controller.cacheWasUsed()
        }
    }

    private fun goldenOf(bundle: Bundle) = GoldenRecord.parse(bundle.read("golden.json"), bundle.read("golden.safetensors"))

    private fun benchOf(bundle: Bundle): Map<String, Any?> {
        val settings = BenchSettings(threads = device.threads())
        val golden = if (bundle.manifest.goldenFile == null) null else goldenOf(bundle)
        var name = bundle.manifest.runtime
        val figures = Benchmark(settings, device::memoryUse).run(
            BenchReport.ids(bundle, golden),
            { backends.open(bundle).also { name = it.name } },
        ) { done, total ->
            report(done.toLong(), total.toLong())
            !cancelled
        }
        return BenchReport.of(bundle, name, device.machine(), settings, figures)
    }

    private fun report(done: Long, total: Long) {
        main.post { progress = if (total > 0) done.toFloat() / total else 0f }
    }

    /** Runs on the worker, one thing at a time; an error becomes a sentence on the screen. */
    private fun work(what: String?, block: () -> Unit) {
        worker.execute {
            cancelled = false
            main.post {
                if (what != null) busy = what
                progress = 0f
            }
            val sentence = try {
                block()
                null
            } catch (error: PitError) {
                error.message
            } catch (error: java.io.IOException) {
                "A file could not be read or written (${error.message}); look at the free space of the device."
            } catch (error: OutOfMemoryError) {
                "There is not enough memory for this; close other apps and try again."
            }
            if (sentence != null) Log.w(TAG, sentence)
            main.post {
                if (what != null) busy = null
                if (sentence != null) notice = sentence
            }
        }
    }

    companion object {
        private const val TAG = "pit-deploy"
        private var instance: AppModel? = null

        /** Called on the main thread. */
        fun of(application: Application): AppModel = instance ?: AppModel(application).also { instance = it }
    }
}
