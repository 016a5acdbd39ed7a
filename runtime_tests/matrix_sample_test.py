"""The sample model's row of the parity matrix, whole and broken. The bundles of `make parity SAMPLE=1` are taken, or
made (half an hour); the row itself takes minutes. `make test-slow`."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from matrix import CHECKOUT, sample_skip, sample_subject
from matrix_faults import broken, match_hashes, zero_layer_7

from pit_deploy.matrix.artifacts import Subject
from pit_deploy.matrix.columns import absence, choose_columns
from pit_deploy.matrix.run import run_matrix, write_matrix
from pit_deploy.matrix.table import Matrix, Row

pytestmark = pytest.mark.slow

NAMES = [
    "torch",
    "transformers",
    "onnxruntime",
    "genai",
    "onnxruntime-web",
    "executorch",
    "executorch-runner",
    "mil",
]
TEXT = {
    "genai": ("shared", "fp32"),
    "executorch-runner": ("untied", "int8"),
    "transformers.js": ("shared", "int8"),
}


@pytest.fixture(scope="module")
def sample() -> Subject:
    return sample_subject(CHECKOUT / "build" / "parity" / "store")


def row(layout: str, precision: str) -> Row:
    return Row.model_validate({"checkpoint": "sample", "layout": layout, "precision": precision})


@pytest.fixture(scope="module")
def timed(sample: Subject, tmp_path_factory: pytest.TempPathFactory) -> tuple[Matrix, float]:
    """The row in every runtime that is not emulated, nothing kept from before, and its seconds."""
    started = time.perf_counter()
    store = tmp_path_factory.mktemp("sample")
    matrix = run_matrix([sample], store=store, runtimes=NAMES, processes=2, skip=sample_skip)
    return matrix, time.perf_counter() - started


def test_the_row_passes_within_a_quarter_of_an_hour(timed: tuple[Matrix, float], tmp_path: Path) -> None:
    matrix, seconds = timed
    print(f"\nthe sample's row: {seconds:.0f} s")
    assert [(cell.name, cell.reasons) for cell in matrix.cells if cell.red] == []
    for layout, precision, name in (
        ("shared", "fp32", "torch"),
        ("untied", "fp32", "torch"),
        ("untied", "fp32", "transformers"),
        ("shared", "fp32", "onnxruntime"),
        ("shared", "int8", "onnxruntime"),
        ("shared", "mixed", "onnxruntime"),
        ("shared", "int8", "genai"),
        ("shared", "mixed", "genai"),
        ("untied", "int8", "executorch"),
        ("untied", "int8", "executorch-runner"),
        ("untied", "int8", "mil"),
    ):
        assert matrix.cell(row(layout, precision), name).status == "passed"
    assert seconds <= 900
    _, page = write_matrix(matrix, tmp_path)
    assert page.stat().st_size < 1_500_000


def one_end_id(bundle: Path) -> None:
    found = json.loads((bundle / "generation_config.json").read_text())
    found["eos_token_id"] = 5
    (bundle / "generation_config.json").write_text(json.dumps(found))
    match_hashes(bundle)


def one_byte_less(bundle: Path) -> None:
    with (bundle / "model.onnx_data").open("r+b") as stream:
        stream.truncate((bundle / "model.onnx_data").stat().st_size - 1)


def one_merge_less(bundle: Path) -> None:
    tokenizer = json.loads((bundle / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].pop()  # the rarest: no check text needs it
    (bundle / "tokenizer.json").write_text(json.dumps(tokenizer))
    match_hashes(bundle)


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (zero_layer_7, "the first hidden state out of tolerance is that of layer 7"),
        (one_end_id, "generation_config.json is not the checkpoint's: eos_token_id is 5 and was"),
        (one_byte_less, "model.onnx_data has"),
        (one_merge_less, "tokenizer.json is not the checkpoint's: the merge "),
    ],
)
def test_a_broken_bundle_is_red_and_the_others_are_not(
    sample: Subject, tmp_path: Path, damage: Callable[[Path], None], cause: str
) -> None:
    kept = tuple(b for b in sample.bundles if b.name in ("onnx-int8", "onnx-mixed"))
    subject = broken(Subject("sample", sample.source, kept), tmp_path, damage, "onnx-int8")
    try:
        matrix = run_matrix(
            [subject], store=tmp_path / "store", runtimes=["onnxruntime", "genai"], processes=0
        )
    finally:
        shutil.rmtree(tmp_path / "onnx-int8")
    red = {(c.row.precision, c.runtime): "; ".join(c.reasons) for c in matrix.cells if c.red}
    assert set(red) == {("int8", "onnxruntime"), ("int8", "genai")}
    assert all(cause in reason for reason in red.values()), red


@pytest.mark.parametrize("name", ["genai", "executorch-runner", "transformers.js", "transformers"])
def test_a_client_that_nobody_here_wrote(sample: Subject, name: str) -> None:
    """Each opens the same bundle (or the fold) and gives the greedy text of its reference."""
    (column,) = choose_columns([name])
    reason = absence(column)
    if reason is not None:
        pytest.skip(reason)
    layout, precision = TEXT.get(name, ("untied", "fp32"))
    matrix = run_matrix(
        [sample],
        store=CHECKOUT / "build" / "parity" / "store",
        runtimes=[name],
        skip=lambda r, _: None if (r.layout, r.precision) == (layout, precision) else "another row",
        processes=0,
    )
    cell = matrix.cell(row(layout, precision), name)
    assert cell.status == "passed", cell.reasons
    assert cell.text is not None and cell.text.tokens >= 16 and cell.text.found.startswith(cell.text.expected)
