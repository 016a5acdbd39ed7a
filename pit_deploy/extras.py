"""Optional packages, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from pit_deploy.errors import MissingExtraError


def require(package: str, extra: str) -> Any:
    """Import `package` and return it; raise `MissingExtraError` that names `extra` where it is not installed."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name and not (package == error.name or package.startswith(error.name + ".")):
            raise  # the package is there and lacks something of its own: not ours to explain away
        raise MissingExtraError(package.split(".")[0], extra) from error
