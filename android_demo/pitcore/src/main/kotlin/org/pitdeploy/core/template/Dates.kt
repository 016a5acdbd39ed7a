package org.pitdeploy.core.template

import java.text.SimpleDateFormat
import java.util.Date
import java.util.Locale

/** The date formats that templates ask for, with English names as in Python without a locale. */
internal object Dates {
    private val FIELDS = mapOf(
        'd' to "dd", 'm' to "MM", 'Y' to "yyyy", 'y' to "yy", 'b' to "MMM", 'B' to "MMMM",
        'A' to "EEEE", 'a' to "EEE", 'H' to "HH", 'M' to "mm", 'S' to "ss",
    )

    fun format(date: Date, pattern: String): String {
        val out = StringBuilder()
        var at = 0
        while (at < pattern.length) {
            if (pattern[at] != '%') {
                out.append(pattern[at++])
                continue
            }
            val letter = pattern.getOrNull(at + 1)
            val field = FIELDS[letter] ?: stop("it writes the date with '%${letter ?: ""}', which this app does not know")
            out.append(SimpleDateFormat(field, Locale.ENGLISH).format(date))
            at += 2
        }
        return out.toString()
    }
}
