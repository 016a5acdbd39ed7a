"""Progress by callback: libraries report, only the command line draws."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as `progress(stage, done, total)`; `done` counts up to `total` within one stage."""


def silent(stage: str, done: int, total: int) -> None:
    """The default: say nothing."""
