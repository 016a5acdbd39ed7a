"""pit-deploy: small language models with Pseudo-Inverse Tying, folded, exported, verified and run.

The verbs are functions with the names and defaults of the commands; importing this package is cheap, each verb
brings its frameworks in when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pit_deploy.benchmark import bench as bench
    from pit_deploy.bundle import Bundle as Bundle
    from pit_deploy.conversion import convert as convert
    from pit_deploy.errors import PitDeployError as PitDeployError
    from pit_deploy.exporting import export as export
    from pit_deploy.folding import fold as fold
    from pit_deploy.inspection import inspect as inspect
    from pit_deploy.interface import PITInterface as PITInterface
    from pit_deploy.model import PITForCausalLM as PITForCausalLM
    from pit_deploy.parity import verify as verify
    from pit_deploy.running import run as run
    from pit_deploy.runtimes import open_runtime as open_runtime
    from pit_deploy.sample import write_sample as write_sample
    from pit_deploy.training.run import train as train

_PLACES = {
    "Bundle": "bundle",
    "PITForCausalLM": "model",
    "PITInterface": "interface",
    "PitDeployError": "errors",
    "bench": "benchmark",
    "convert": "conversion",
    "export": "exporting",
    "fold": "folding",
    "inspect": "inspection",
    "open_runtime": "runtimes",
    "run": "running",
    "train": "training.run",
    "verify": "parity",
    "write_sample": "sample",
}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'pit_deploy' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pit_deploy.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_PLACES]
