package org.pitdeploy.demo

import android.content.Intent
import android.os.Bundle
import android.view.WindowManager
import androidx.activity.ComponentActivity
import androidx.activity.compose.setContent
import androidx.activity.result.contract.ActivityResultContracts
import org.pitdeploy.core.Task

/** The only activity: four screens, and the extras that scripts start it with. */
class MainActivity : ComponentActivity() {
    private lateinit var app: AppModel

    private val picker = registerForActivityResult(ActivityResultContracts.OpenDocumentTree()) { folder ->
        if (folder != null) app.import(FolderSource(contentResolver, folder))
    }

    override fun onCreate(savedInstanceState: Bundle?) {
        super.onCreate(savedInstanceState)
        // A phone whose screen goes dark slows down, and a benchmark would measure that.
        window.addFlags(WindowManager.LayoutParams.FLAG_KEEP_SCREEN_ON)
        app = AppModel.of(application)
        app.refresh()
        setContent { DemoScreen(app, onPick = { picker.launch(null) }) }
        if (savedInstanceState == null) handle(intent)
    }

    override fun onNewIntent(intent: Intent) {
        super.onNewIntent(intent)
        handle(intent)
    }

    private fun handle(intent: Intent) {
        val task = Task.of(
            bundle = intent.getStringExtra("bundle"),
            bench = intent.getBooleanExtra("bench", false),
            parity = intent.getBooleanExtra("parity", false),
        )
        if (task != null) app.run(task)
    }
}
