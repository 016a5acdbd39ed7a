package org.pitdeploy.demo

import android.content.ContentResolver
import android.net.Uri
import android.provider.DocumentsContract
import android.provider.DocumentsContract.Document
import java.io.IOException
import java.io.InputStream
import org.pitdeploy.core.BundleSource

/** A folder that the user picked, through the system's file picker: no storage permission is needed for it. */
class FolderSource(private val resolver: ContentResolver, private val tree: Uri) : BundleSource {
    private val root = DocumentsContract.getTreeDocumentId(tree)
    private val children = HashMap<String, Map<String, String>>()

    override val name: String = root.substringAfterLast('/').substringAfterLast(':').ifEmpty { "the folder" }

    override fun open(path: String): InputStream? = try {
        path.split("/").fold<String, String?>(root) { id, part -> id?.let { children(it)[part] } }
            ?.let { resolver.openInputStream(DocumentsContract.buildDocumentUriUsingTree(tree, it)) }
    } catch (error: RuntimeException) { // of the app that gives the files: a right withdrawn, a folder gone
        throw IOException(error.message ?: "the folder cannot be read", error)
    }

    /** Document ids by name. */
    private fun children(id: String): Map<String, String> = children.getOrPut(id) {
        val found = HashMap<String, String>()
        val columns = arrayOf(Document.COLUMN_DISPLAY_NAME, Document.COLUMN_DOCUMENT_ID)
        val uri = DocumentsContract.buildChildDocumentsUriUsingTree(tree, id)
        resolver.query(uri, columns, null, null, null)?.use { rows ->
            while (rows.moveToNext()) found[rows.getString(0)] = rows.getString(1)
        }
        found
    }
}
