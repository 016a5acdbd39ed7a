// Signatures only; see the README of this folder.
package androidx.activity.result.contract

import android.net.Uri

abstract class ActivityResultContract<I, O>

class ActivityResultContracts {
    open class OpenDocumentTree : ActivityResultContract<Uri?, Uri?>()
}
