"""Runtimes by name. Each lives in a file of its own and is imported when it is opened."""

from __future__ import annotations

import os
import sys

from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError
from pit_deploy.runtimes.base import FullRuntime, Runtime, TextRuntime, VerifyingRuntime

__all__ = [
    "TEXT_FIT",
    "FullRuntime",
    "Runtime",
    "TextRuntime",
    "VerifyingRuntime",
    "open_runtime",
    "open_text_runtime",
]

FIT = {
    "onnx": ("onnxruntime", "onnxruntime-web", "chromium", "arm64-onnxruntime", "adb"),
    "executorch": ("executorch", "arm64-executorch"),
    "coreml": ("mil", "coreml"),
}
"""Runtimes that open a bundle, by the manifest's `runtime`; the first is the usual one. After a colon some take more:
`arm64-onnxruntime:cortex-a72`, `adb:SERIAL`."""
TAKE_MORE = ("arm64-onnxruntime", "arm64-executorch", "adb")
TEXT_FIT = {"genai": "onnx", "executorch-runner": "executorch", "transformers.js": "onnx"}
"""Stock runners, which give only text, and the bundles that they open."""
TEXT_KERNELS = {"genai": "onnxruntime", "executorch-runner": "executorch", "transformers.js": "chromium"}
"""The runtime of ours that computes with the same kernels as a stock runner."""


def open_runtime(
    bundle: Bundle, name: str | None = None, *, threads: int | None = None, speculate: bool = False
) -> Runtime:
    """Open the bundle's artifact in a runtime (None: the usual one for it).

    With `speculate` it is a `VerifyingRuntime`. Raises `InputError` for an unfit name, and where speculation could
    change the text.
    """
    fit = FIT.get(bundle.manifest.runtime, ())
    name = name or _usual(bundle.manifest.runtime) or ""
    family = name.partition(":")[0]
    if name not in fit and (family not in fit or family not in TAKE_MORE):
        raise _unfit(name, bundle)
    check_threads(threads)
    if speculate and name != "onnxruntime":
        raise InputError(f"speculation is built for onnxruntime, not for {name}; leave --speculate out.")
    if name == "executorch":
        from pit_deploy.runtimes.executorch import ExecutorchRuntime

        return ExecutorchRuntime.open(bundle.path, bundle.manifest, threads)
    if name == "mil":
        from pit_deploy.runtimes.mil import MilRuntime

        return MilRuntime(bundle)
    if name == "coreml":
        from pit_deploy.runtimes.coreml import CoreMLRuntime

        return CoreMLRuntime(bundle)
    if family in ("arm64-onnxruntime", "arm64-executorch"):
        from pit_deploy.runtimes.arm64 import open_arm64

        return open_arm64(bundle, name, threads=threads)
    if family == "adb":
        from pit_deploy.runtimes.adb_runtime import open_device

        return open_device(bundle, name.partition(":")[2] or None, threads=threads)
    if name in ("onnxruntime-web", "chromium"):
        from pit_deploy.runtimes.browser import BrowserRuntime

        return BrowserRuntime(bundle, name, threads)
    from pit_deploy.runtimes.onnxruntime import OnnxRuntime, check_external_data

    check_external_data(bundle)
    if speculate:
        from pit_deploy.runtimes.onnx_verification import VerifyingOnnxRuntime

        return VerifyingOnnxRuntime.open(bundle.path, bundle.manifest, threads)
    return OnnxRuntime.open(bundle.path, bundle.manifest, threads)


def open_text_runtime(bundle: Bundle, name: str, *, threads: int | None = None) -> TextRuntime:
    """Open the bundle's artifact in a stock runner. Raises `InputError` for an unfit name."""
    if TEXT_FIT.get(name) != bundle.manifest.runtime:
        raise _unfit(name, bundle)
    check_threads(threads)
    if name == "genai":
        from pit_deploy.runtimes.genai import GenaiTextRunner

        return GenaiTextRunner(bundle)
    if name == "transformers.js":
        from pit_deploy.runtimes.browser_text import TransformersJsRunner

        return TransformersJsRunner(bundle, threads)
    from pit_deploy.runtimes.executorch_text import ExecutorchTextRunner

    return ExecutorchTextRunner(bundle, threads)


def _unfit(name: str, bundle: Bundle) -> InputError:
    """The error for a name that does not open a bundle, with those that do."""
    kind = bundle.manifest.runtime
    fit = [*FIT.get(kind, ()), *(text for text, opens in TEXT_FIT.items() if opens == kind)]
    family, part = name.partition(":")[::2]
    reason = f" ({family} takes nothing after a colon)" if part and family in fit else ""
    return InputError(
        f"the runtime {name!r} cannot open this {kind} bundle; use {', '.join(fit[:-1])} or {fit[-1]}{reason}."
    )


def _usual(kind: str) -> str | None:
    """The runtime that opens a kind of bundle where none is named: Core ML itself where there is one."""
    if kind == "coreml" and sys.platform == "darwin":
        return "coreml"
    return next(iter(FIT.get(kind, ())), None)


def check_threads(threads: int | None) -> None:
    """Raise `InputError` for a number of threads that would only harm: below 1, or far above the processors."""
    most = 4 * (os.cpu_count() or 1)
    if threads is not None and not 1 <= threads <= most:
        raise InputError(
            f"--threads {threads} is not usable here; give 1 to {most} ({os.cpu_count()} processors)."
        )
