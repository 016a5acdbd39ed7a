"""The ExecuTorch package: imported without its chatter, and only beside the torch that it was built for."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from pit_deploy.errors import PitDeployError
from pit_deploy.extras import require

EXTRA = "executorch"
TORCH_OF = {"1.4": "2.13"}
"""Versions of torch by versions of executorch: its libraries are linked against one, and pip does not know which."""


def import_executorch(module: str) -> Any:
    """Import a module of executorch.

    Raises `MissingExtraError` where it is not installed, and `PitDeployError` beside another torch than it was built
    for: that fails in strange ways, or not at once.
    """
    require("torch", EXTRA)
    check_pairing(_version("executorch"), _version("torch"))
    try:
        with without_output():
            return importlib.import_module(module)
    except (ImportError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PitDeployError(
            f"executorch {version('executorch')} cannot be loaded beside torch {version('torch')} ({reason}); run: "
            f"pip install 'pit-deploy[{EXTRA}]'"
        ) from error


def check_pairing(executorch: str, torch: str) -> None:
    """Raise `PitDeployError` for versions that were not run together."""
    for needs, built_for in TORCH_OF.items():
        if executorch.startswith(f"{needs}."):
            if not torch.startswith(f"{built_for}."):
                raise PitDeployError(
                    f"executorch {executorch} was built for torch {built_for}, and torch {torch} is installed; run: "
                    f"pip install 'pit-deploy[{EXTRA}]'"
                )
            return
    known = ", ".join(f"executorch {a} with torch {b}" for a, b in TORCH_OF.items())
    raise PitDeployError(
        f"executorch {executorch} is not a version that pit-deploy was run with ({known}); run: pip install "
        f"'pit-deploy[{EXTRA}]'"
    )


def _version(package: str) -> str:
    require(package, EXTRA)
    return version(package)


@contextmanager
def without_output() -> Iterator[None]:
    """Without what libraries write to standard error past Python: remarks about the processor, and of loggers.

    ExecuTorch's C++ code cannot be told to be silent. What goes wrong is raised, and is not lost.
    """
    sys.stderr.flush()
    disabled = logging.root.manager.disable
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        logging.disable(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.stderr.flush()
        logging.disable(disabled)
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
