package org.pitdeploy.demo

import android.app.ActivityManager
import android.content.Context
import android.os.Build
import java.io.File
import org.pitdeploy.core.Machine
import org.pitdeploy.core.MemoryUse

/** What the phone tells of itself. */
class Device(private val context: Context) {
    private val memory: ActivityManager.MemoryInfo
        get() = ActivityManager.MemoryInfo().also {
            (context.getSystemService(Context.ACTIVITY_SERVICE) as ActivityManager).getMemoryInfo(it)
        }

    /** What can be taken before the system begins to end other apps. */
    fun availableBytes(): Long = memory.let { it.availMem - it.threshold }

    fun machine() = Machine(
        system = "Android ${Build.VERSION.RELEASE} (API ${Build.VERSION.SDK_INT})",
        architecture = Build.SUPPORTED_ABIS.firstOrNull() ?: "unknown",
        processor = "${Build.MANUFACTURER} ${Build.MODEL} (${Build.HARDWARE})",
        cores = Runtime.getRuntime().availableProcessors(),
        memoryBytes = memory.totalMem,
    )

    /** Resident memory of this process, from /proc; null where it cannot be read. */
    fun memoryUse(): MemoryUse? {
        val lines = try {
            File("/proc/self/status").readLines()
        } catch (_: java.io.IOException) {
            return null
        }
        fun bytes(name: String): Long? =
            lines.firstOrNull { it.startsWith("$name:") }?.substringAfter(":")?.trim()?.substringBefore(" ")?.toLongOrNull()?.times(1024)
        return MemoryUse(bytes("VmRSS") ?: return null, bytes("RssAnon"), bytes("VmHWM") ?: return null)
    }

    /** Half of the cores, at most four: the others are slow on most phones, and waiting for them costs more than they give. */
    fun threads(): Int = (Runtime.getRuntime().availableProcessors() / 2).coerceIn(1, 4)
}
