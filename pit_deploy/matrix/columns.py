"""The columns of the matrix: every runtime of the registry, and those that run a fold; and what is absent here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

from pit_deploy.errors import InputError, PitDeployError
from pit_deploy.matrix.artifacts import package_version
from pit_deploy.matrix.table import Column
from pit_deploy.runtimes import FIT, TAKE_MORE, TEXT_FIT

_PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "onnxruntime": "onnxruntime",
    "genai": "onnxruntime-genai",
    "executorch": "executorch",
    "executorch-runner": "executorch",
    "mil": "coremltools",
    "coreml": "coremltools",
}
_EXTRAS = {"onnx": "onnx", "executorch": "executorch", "coreml": "coreml", "fold": "onnx", "hf": "onnx"}
VARIANTS = {
    "arm64-onnxruntime": ("cortex-a76", "cortex-a76:no-kleidiai", "cortex-a72"),
    "arm64-executorch": ("cortex-a76",),  # PyTorch's ARM64 wheel needs instructions that a Cortex-A72 lacks
}
"""Emulated processors, each a column."""
_ORDER = ("torch", "transformers", "onnxruntime", "genai", "arm64-onnxruntime", "onnxruntime-web", "chromium")
_LAST = ("transformers.js", "executorch", "executorch-runner", "arm64-executorch", "mil", "coreml", "adb")


def all_columns() -> tuple[Column, ...]:
    """Every column, also of what is absent on this machine, in the order of the table."""
    found = {"torch": ("fold", "logits"), "transformers": ("hf", "logits")}
    found |= {name: (target, "logits") for target, names in FIT.items() for name in names}
    found |= {name: (target, "text") for name, target in TEXT_FIT.items()}
    order = [*_ORDER, *_LAST]
    columns = []
    for name in sorted(found, key=lambda n: order.index(n) if n in order else len(order)):
        target, gives = found[name]
        for variant in VARIANTS.get(name, ("",)):
            label = f"{name}:{variant}" if variant else name
            version = package_version(_PACKAGES[name]) if name in _PACKAGES else _tool_version(name)
            columns.append(Column(name=label, target=target, version=version, gives=gives))  # type: ignore[arg-type]
    return tuple(columns)


def choose_columns(names: Sequence[str] | None) -> tuple[Column, ...]:
    """The columns called `names` (a name without its processor stands for all of them); None is all."""
    known = all_columns()
    if names is None:
        return known
    chosen = []
    for name in names:
        base = name.split(":")[0]
        fit = [c for c in known if name in (c.name, c.name.split(":")[0])]
        if not fit and base in TAKE_MORE:  # a device by its serial number, or a processor that has no column
            fit = [c.model_copy(update={"name": name}) for c in known if base == c.name.split(":")[0]][:1]
            known = (*known, *fit)
        if not fit:
            raise InputError(f"there is no runtime {name!r}; known are {', '.join(c.name for c in known)}.")
        chosen += fit
    return tuple(c for c in known if c in chosen)


def absence(column: Column) -> str | None:
    """Why a column cannot run here, with the command that sets it up; None where it can be tried."""
    name = column.name.split(":")[0]
    package = _PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package.replace("-", "_")) is None:
        extra = "bench" if name == "genai" else _EXTRAS[column.target]
        return f"the package {package} is not installed; run: pip install 'pit-deploy[{extra}]'"
    probe = _PROBES.get(name)
    try:
        return None if probe is None else probe()
    except PitDeployError as error:
        return str(error)


def _core_ml() -> str | None:
    from pit_deploy.runtimes.coreml import check_system

    check_system()
    return None


def _node() -> str | None:
    from pit_deploy.runtimes.browser_tools import installed_modules, node

    node()
    installed_modules()
    return None


def _browser() -> str | None:
    from pit_deploy.runtimes.browser_tools import chromium

    _node()
    chromium()
    return None


def _arm64(kind: str) -> Callable[[], str | None]:
    def probe() -> str | None:
        from pit_deploy.runtimes.arm64 import missing

        return missing(kind)

    return probe


def _device() -> str | None:
    from pit_deploy.runtimes.adb import choose_devices
    from pit_deploy.runtimes.adb_files import local_runner

    choose_devices(None)
    local_runner()
    return None


_PROBES: dict[str, Callable[[], str | None]] = {
    "coreml": _core_ml,
    "onnxruntime-web": _node,
    "chromium": _browser,
    "transformers.js": _browser,
    "arm64-onnxruntime": _arm64("onnx"),
    "arm64-executorch": _arm64("executorch"),
    "adb": _device,
}


def _tool_version(name: str) -> str | None:
    """The version of what is no Python package."""
    if name in ("onnxruntime-web", "chromium", "transformers.js"):
        from pit_deploy.json_files import read_json
        from pit_deploy.runtimes.browser_tools import SCRIPTS

        wanted = read_json(SCRIPTS / "package.json")["dependencies"]
        package = "@huggingface/transformers" if name == "transformers.js" else "onnxruntime-web"
        return str(wanted[package])
    return None
