"""JSON objects in files, with errors that say where the fault is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pit_deploy.errors import InputError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `InputError` with the place of the fault."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is missing.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}).") from error
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}."
        ) from error
    except ValueError as error:  # a number of more digits than Python reads
        raise InputError(f"{path} is not valid JSON: {error}.") from error
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; a file is expected.") from None
    except RecursionError:
        raise InputError(f"{path} is nested too deeply to be a config.") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a JSON {type(value).__name__}; an object is expected.")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """As `read_json`, with an empty object for a missing file."""
    return read_json(path) if path.exists() else {}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
