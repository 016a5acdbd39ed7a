"""Runtimes by name. Each lives in a file of its own and is imported when it is opened."""

from __future__ import annotations

import os

from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError
from pit_deploy.runtimes.base import FullRuntime, Runtime

__all__ = ["FullRuntime", "Runtime", "open_runtime"]

NAMES = ("onnxruntime",)
_DEFAULT = {"onnx": "onnxruntime"}


def open_runtime(bundle: Bundle, name: str | None = None, *, threads: int | None = None) -> Runtime:
    """Open the bundle's artifact in a runtime (None: the usual one for it). Raises `InputError` for an unfit name."""
    name = name or _DEFAULT.get(bundle.manifest.runtime)
    if name not in NAMES or _DEFAULT.get(bundle.manifest.runtime) != name:
        fit = _DEFAULT.get(bundle.manifest.runtime)
        raise InputError(
            f"the runtime {name!r} cannot open this {bundle.manifest.runtime} bundle; "
            f"{f'use {fit}' if fit else f'known runtimes are {NAMES}'}."
        )
    check_threads(threads)
    from pit_deploy.runtimes.onnxruntime import OnnxRuntime, check_external_data

    check_external_data(bundle)
    return OnnxRuntime.open(bundle.path, bundle.manifest, threads)


def check_threads(threads: int | None) -> None:
    """Raise `InputError` for a number of threads that would only harm: below 1, or far above the processors."""
    most = 4 * (os.cpu_count() or 1)
    if threads is not None and not 1 <= threads <= most:
        raise InputError(
            f"--threads {threads} is not usable here; give 1 to {most} ({os.cpu_count()} processors)."
        )
