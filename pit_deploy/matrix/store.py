"""Cells that were checked before, kept by all that they depend on, so that an interrupted matrix goes on."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from pit_deploy.files import atomic_output
from pit_deploy.matrix.artifacts import Subject, carried_hash, code_hash, content_hash, package_versions
from pit_deploy.matrix.table import Cell, Column, Row

_ROOT = Path(__file__).parent.parent
_CHECKING = (
    "parity.py",
    "text_parity.py",
    "golden.py",
    "gates.py",
    "bundle.py",
    "manifest.py",
    "generation_config.py",
)


class CellStore:
    """JSON files of cells below `folder`. Only cells in which something was compared are kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "cells"

    def load(self, key: str) -> Cell | None:
        """The cell that was saved under `key`; None where there is none, or one of an older form."""
        try:
            return Cell.model_validate_json((self._folder / f"{key}.json").read_bytes())
        except (OSError, ValidationError):
            return None

    def save(self, key: str, cell: Cell) -> None:
        """Keep a cell. One in which nothing was compared is not kept: a tool may be there the next time."""
        if cell.logits is None and cell.text is None:
            return
        with atomic_output(self._folder / f"{key}.json", overwrite=True, directory=False) as partial:
            partial.write_text(cell.model_dump_json())


def cell_key(subject: Subject, row: Row, column: Column, artifact: Path) -> str:
    """SHA-256 over everything that decides a cell: the artifact's bytes, the carried files of its checkpoint, the code
    that checks, the runtime and its version."""
    source = "" if subject.source is None else carried_hash(subject.source)
    parts = [
        row.model_dump_json(),
        column.model_dump_json(),
        content_hash(artifact),
        source,
        _checking_code(),
        package_versions(),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@cache
def _checking_code() -> str:
    own = [_ROOT / name for name in _CHECKING]
    return code_hash(*own, _ROOT / "runtimes", _ROOT / "matrix" / "checks.py", _ROOT / "matrix" / "table.py")
