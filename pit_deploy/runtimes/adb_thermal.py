"""How warm a device is and what its clocks follow, as far as it tells; and waiting until it is cool."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from pit_deploy.runtimes.adb import Adb

COOL_DEGREES = 38.0
"""A run starts at or below it."""
COOL_SECONDS = 300.0
"""The longest wait for that."""
POLL_SECONDS = 5.0
_PROCESSOR = re.compile(r"cpu|soc|tsens|cluster|big|little|mtktscpu|exynos", re.IGNORECASE)
_ZONES = (
    "for z in /sys/class/thermal/thermal_zone*; do "
    'echo "$(cat $z/type 2>/dev/null)|$(cat $z/temp 2>/dev/null)"; done; '
    "dumpsys battery 2>/dev/null | sed -n 's/^ *temperature: */battery:/p'"
)
_GOVERNORS = "cat /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor 2>/dev/null || true"
_COLDEST, _HOTTEST = 1.0, 150.0
"""Degrees outside of which a zone is no thermometer."""


@dataclass(frozen=True)
class Temperature:
    """Degrees Celsius, and the zone that shows them: the warmest of the processor's, or else the battery."""

    degrees: float
    zone: str


def temperature(adb: Adb) -> Temperature | None:
    """How warm the device is; None where no zone can be read."""
    battery: Temperature | None = None
    found: list[Temperature] = []
    for line in adb.shell(_ZONES).splitlines():
        if line.startswith("battery:"):
            battery = _reading("battery", _number(line.partition(":")[2]) / 10)  # tenths of a degree
            continue
        zone, _, text = line.partition("|")
        value = _number(text)  # thousandths of a degree; some old zones tell whole ones
        read = _reading(zone.strip(), value / 1000 if abs(value) >= _HOTTEST else value)
        if read is not None and _PROCESSOR.search(read.zone):
            found.append(read)
    return max(found, key=lambda t: t.degrees, default=battery)


def governor(adb: Adb) -> str | None:
    """What the clocks of the processor follow; several names where cores differ, None where it is not readable."""
    names = dict.fromkeys(adb.shell(_GOVERNORS).split())
    return ", ".join(names) or None


def cool_down(
    adb: Adb,
    *,
    degrees: float = COOL_DEGREES,
    seconds: float = COOL_SECONDS,
    poll: float = POLL_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> Temperature | None:
    """Wait until the device is at or below `degrees`, at most `seconds`; its temperature then.

    None at once where it does not tell.
    """
    waited = 0.0
    while True:
        now = temperature(adb)
        if now is None or now.degrees <= degrees or waited >= seconds:
            return now
        sleep(poll)
        waited += poll


def _number(text: str) -> float:
    """The number in a line; NaN where it is none."""
    try:
        return float(text.strip())
    except ValueError:
        return math.nan


def _reading(zone: str, degrees: float) -> Temperature | None:
    return Temperature(degrees, zone) if zone and _COLDEST < degrees < _HOTTEST else None
