// Signatures only; see the README of this folder.
package androidx.activity

import android.app.Activity
import android.content.Intent
import androidx.activity.result.ActivityResultLauncher
import androidx.activity.result.contract.ActivityResultContract

open class ComponentActivity : Activity() {
    override fun onNewIntent(intent: Intent): Unit = throw UnsupportedOperationException()

    fun <I, O> registerForActivityResult(contract: ActivityResultContract<I, O>, callback: (O) -> Unit): ActivityResultLauncher<I> =
        throw UnsupportedOperationException()
}
