"""`make parity`: the parity matrix of tiny checkpoints of every family, or of the sample model.

    python runtime_tests/matrix.py                       tiny models in every runtime, minutes
    python runtime_tests/matrix.py --bundle DIR ...      bundles made before, with --source for what they were made from
    python runtime_tests/matrix.py --sample              the sample model, exported first where it has not been

parity.html, parity.json and what is kept for the next call are in build/parity. Exit status 1 if a cell is red.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

from matrix_models import FAMILIES, write_tiny

from pit_deploy.errors import InputError, PitDeployError
from pit_deploy.files import atomic_output
from pit_deploy.matrix.artifacts import Subject, code_hash
from pit_deploy.matrix.run import run_matrix, write_matrix
from pit_deploy.matrix.table import Cell, Column, Matrix, Row
from pit_deploy.matrix.worker import processors

CHECKOUT = Path(__file__).parent.parent
SLOW = ("arm64-onnxruntime", "arm64-executorch", "chromium", "transformers.js", "onnxruntime-web")
"""Emulated processors and browsers: in the fast matrix they run on one family."""
SLOW_ROWS = {
    ("shared", "fp32"),
    ("shared", "int8"),
    ("shared", "mixed"),
    ("untied", "fp32"),
    ("untied", "int8"),
}
EMULATED_ROWS = {"arm64-onnxruntime": ("shared", "int8"), "arm64-executorch": ("untied", "int8")}
EXECUTORCH_ROWS = {("untied", "fp32"), ("untied", "int8")}

Skip = Callable[[Row, Column], str | None]


def tiny_subject(store: Path, family: str) -> Subject:
    """The tiny PIT checkpoint of a family, made once and again when its recipe changes."""
    from pit_deploy import convert

    recipe = code_hash(Path(__file__).with_name("matrix_models.py"))
    room = store / "checkpoints" / f"tiny-{family}"
    if not (room / recipe).is_file():
        with atomic_output(room, overwrite=True) as partial:
            write_tiny(partial / "plain", family)
            convert(partial / "plain", partial / "pit", check=False)
            (partial / recipe).touch()
    return Subject(f"tiny-{family}", room / "pit")


def fast_skip(row: Row, column: Column) -> str | None:
    """What the fast matrix leaves out to stay fast."""
    first, setting = row.checkpoint == f"tiny-{FAMILIES[0]}", (row.layout, row.precision)
    name = column.name.split(":")[0]
    advice = "left out of the fast matrix; run: make parity FULL=1"
    if name in SLOW and not (first and setting in SLOW_ROWS):
        return advice
    if setting != EMULATED_ROWS.get(name, setting):
        return advice
    lowered = setting in EXECUTORCH_ROWS if first else setting == ("untied", "fp32")
    if column.target == "executorch" and row.layout == "untied" and not lowered:
        return advice  # twenty seconds each
    return None


def sample_skip(row: Row, column: Column) -> str | None:
    """Emulated processors and browsers take minutes for each bundle of the sample: one processor, no float bundle."""
    name, _, variant = column.name.partition(":")
    if name in SLOW and (row.precision == "fp32" or variant not in ("", "cortex-a76")):
        return "left out: minutes each; run: make parity SAMPLE=1 FULL=1"
    return None


def sample_subject(store: Path) -> Subject:
    """The sample model with its usual bundles, made where they have not been (half an hour the first time)."""
    from pit_deploy import convert, export
    from pit_deploy.sample import write_sample

    room = store / "sample"
    if not (room / "pit").is_dir():
        shutil.rmtree(room / "plain", ignore_errors=True)
        write_sample(room / "plain")
        convert(room / "plain", room / "pit")
    bundles = []
    for name, options in SAMPLE_BUNDLES.items():
        bundles.append(room / name)
        if not bundles[-1].is_dir():
            export(room / "pit", bundles[-1], **options)  # type: ignore[arg-type]
    return Subject("sample", room / "pit", tuple(bundles))


SAMPLE_BUNDLES: dict[str, dict[str, object]] = {
    "onnx-fp32": {"weights": "fp32"},
    "onnx-int8": {},
    "onnx-mixed": {"max_kl": 0.02},  # 0.05 keeps the KL of the gate and misses its top-1 by two points
    "executorch-int8": {"to": "executorch"},
    "coreml-int8": {"to": "coreml"},
}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=CHECKOUT / "build" / "parity", help="default: build/parity"
    )
    parser.add_argument("--sample", action="store_true", help="the sample model instead of tiny ones")
    parser.add_argument("--bundle", type=Path, action="append", help="check this bundle; repeat for several")
    parser.add_argument("--source", type=Path, help="the checkpoint that the bundles were made from")
    parser.add_argument("--name", default="model", help="of that checkpoint in the table")
    parser.add_argument("--runtime", action="append", help="only this runtime; repeat for several")
    parser.add_argument("--full", action="store_true", help="every tiny cell, also the slow ones")
    parser.add_argument(
        "--processes", type=int, default=processors(), help="default: one for each processor; 0: no child"
    )
    arguments = parser.parse_args(given)
    try:
        matrix = build(arguments)
    except PitDeployError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    return 0 if matrix.passed else 1


def build(arguments: argparse.Namespace) -> Matrix:
    """Make the matrix, write it and say what came out."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    out: Path = arguments.out
    store = out / "store"
    skip: Skip | None = None
    if arguments.bundle:
        subjects = [Subject(arguments.name, arguments.source, tuple(arguments.bundle))]
    elif arguments.source is not None:
        raise InputError("--source belongs to --bundle; give the bundles that were made from it.")
    elif arguments.sample:
        subjects = [sample_subject(store)]
        skip = None if arguments.full else sample_skip
    else:
        subjects = [tiny_subject(store, family) for family in FAMILIES]
        skip = None if arguments.full else fast_skip
    started = time.perf_counter()
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("cells", total=None)

        def show(cell: Cell, done: int, total: int) -> None:
            bars.update(task, completed=done, total=total, description=cell.name)
            if cell.red:
                reasons = escape("; ".join(cell.reasons))
                bars.console.print(f"[red]{escape(cell.name)}[/]: {reasons}", soft_wrap=True)

        matrix = run_matrix(
            subjects,
            store=store,
            runtimes=arguments.runtime,
            processes=max(arguments.processes, 0),
            skip=skip,
            on_cell=show,
        )
    written, page = write_matrix(matrix, out, processes=max(arguments.processes, 1))
    counts = ", ".join(
        f"{matrix.count(s)} {s.replace('_', ' ')}"
        for s in ("passed", "out_of_tolerance", "failed", "not_run")
    )
    print(f"{counts}, in {time.perf_counter() - started:.0f} s: {page} and {written.name}")
    return matrix


if __name__ == "__main__":
    sys.exit(main())
