"""What all commands share: where JSON goes, progress bars, places for reports, standard input, arguments."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from pit_deploy.errors import InputError
from pit_deploy.files import atomic_output, check_output
from pit_deploy.progress import Progress


def emit(target: str | None, value: dict[str, Any]) -> bool:
    """Write `value` as JSON to a file or (for "-") standard output; False where no JSON was asked for."""
    if target is None:
        return False
    text = json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    if target == "-":
        print(text)
        return True
    with atomic_output(target, overwrite=True, directory=False) as partial:
        partial.write_text(text + "\n", encoding="utf-8")
    return target == "-"


@contextmanager
def bars(json: str | None = None) -> Iterator[Progress]:
    """Progress bars on standard error where it is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    if json is not None and json != "-":
        check_report(Path(json))
    with Bars(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty() or json == "-"
    ) as shown:
        tasks: dict[str, TaskID] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage, total=total)
            shown.update(tasks[stage], completed=done, total=total)

        yield progress


def check_report(path: Path, inputs: Iterable[Path] = ()) -> None:
    """Refuse a place for a report before the work. A file that is there is replaced, but no input, and nothing inside
    a bundle."""
    check_output(path, overwrite=True, directory=False)
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path} cannot be written: {path.absolute().parent} is not a folder.")
    place = path.resolve()
    if place in {given.resolve() for given in inputs}:
        raise InputError(f"{path} is an input of this command, which is left as it is; name another file.")
    for folder in (place, *place.parents):
        if is_bundle(folder):
            raise InputError(
                f"{path} is inside the bundle {folder}, which is left as it is; name another file."
            )


def is_bundle(folder: Path) -> bool:
    """Whether a folder has the manifest of a bundle, of whatever version."""
    from pit_deploy.manifest import FORMAT

    try:
        found = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"Standard input is not UTF-8 text (byte {error.start}).") from error


def prepared(arguments: list[str]) -> list[str]:
    """`--json` without a file means standard output (a file is recognised by its ending), and `--debug` may
    stand anywhere. An option's own value is left alone."""
    values = {"--prompt"}
    found = [a for n, a in enumerate(arguments) if a != "--debug" or (n and arguments[n - 1] in values)]
    if "inspect" in found[:1]:
        return found
    if any(not a and (not n or found[n - 1] not in values) for n, a in enumerate(found)):
        raise InputError("An argument is empty; name a file or folder.")
    result: list[str] = []
    for number, argument in enumerate(found):
        result.append(argument)
        following = found[number + 1] if number + 1 < len(found) else ""
        is_value = number > 0 and found[number - 1] in values
        if argument == "--json" and not is_value and following != "-" and not following.endswith(".json"):
            result.append("-")
    return result


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have, and text for paths."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
