"""The parity matrix: a table of tiny models that passes, and broken bundles that turn their own cells red, by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import matrix_workers
from matrix import fast_skip, main, tiny_subject
from matrix_faults import broken, match_hashes, zero_layer_7
from matrix_models import FAMILIES, STEPS, write_tiny

from pit_deploy import export, verify
from pit_deploy.errors import InputError
from pit_deploy.manifest import BundleError
from pit_deploy.matrix import checks, worker
from pit_deploy.matrix.artifacts import Subject
from pit_deploy.matrix.columns import all_columns, choose_columns
from pit_deploy.matrix.run import run_matrix, write_matrix
from pit_deploy.matrix.table import SCHEMA_PATH, Matrix, Row, read_matrix, schema_text
from pit_deploy.matrix.worker import Job, run_in_processes
from pit_deploy.text_parity import verify_text

IN_PROCESS = ["torch", "transformers", "onnxruntime", "genai"]
CHECKOUT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def tiny(store: Path) -> Subject:
    return tiny_subject(store, "llama")


@pytest.fixture(scope="module")
def matrix(store: Path, tiny: Subject) -> Matrix:
    """Both layouts and every precision of one family, in the runtimes that need no process of their own."""
    return run_matrix(
        [tiny], store=store, runtimes=[*IN_PROCESS, "executorch", "mil"], skip=without_lowering, processes=0
    )


def without_lowering(row: Row, column: Any) -> str | None:
    """ExecuTorch's exports take twenty seconds each, Core ML's one or two."""
    rows = {"executorch": [("shared", "int8")], "coreml": [("untied", "int8"), ("shared", "mixed")]}
    wanted = rows.get(column.target)
    return None if wanted is None or (row.layout, row.precision) in wanted else "another test's"


def row_of(name: str, layout: str, precision: str) -> Row:
    return Row.model_validate({"checkpoint": name, "layout": layout, "precision": precision})


def test_every_cell_passes_or_says_why_it_did_not_run(matrix: Matrix) -> None:
    assert [(c.name, c.reasons) for c in matrix.cells if c.red] == []
    assert matrix.passed and matrix.count("passed") == 26
    assert len(matrix.cells) == len(matrix.rows) * len(matrix.columns) == 60
    for cell in matrix.cells:
        if cell.status == "not_run":
            assert len(cell.reasons) == 1 and cell.logits is None and cell.text is None
        else:
            assert cell.artifact_bytes and (cell.logits is not None or cell.text is not None)
    for layout in ("untied", "shared"):
        for precision in ("fp32", "fp16", "int8", "int4", "mixed"):
            row = row_of("tiny-llama", layout, precision)
            assert matrix.cell(row, "onnxruntime").status == matrix.cell(row, "genai").status == "passed"
    assert matrix.cell(row_of("tiny-llama", "untied", "int8"), "mil").status == "passed"
    assert matrix.cell(row_of("tiny-llama", "shared", "mixed"), "mil").status == "passed"
    shared = matrix.cell(row_of("tiny-llama", "shared", "int8"), "executorch")
    assert shared.status == "not_run" and "layout" in shared.reasons[0]


def test_the_greedy_text_is_the_one_that_the_tables_say(matrix: Matrix, tiny: Subject) -> None:
    """A walk over the circle of `matrix_models` until its end id: known without running any model of ours."""
    from matrix_models import END, START, circle
    from tokenizers import Tokenizer

    assert tiny.source is not None
    tokenizer = Tokenizer.from_file(str(tiny.source / "tokenizer.json"))
    order = circle(tokenizer.get_vocab(with_added_tokens=True), 0)
    expected = tokenizer.decode(order[1 : STEPS + 1])
    texts = [c.text for c in matrix.cells if c.text is not None]
    assert len(texts) > 10 and {t.expected for t in texts} == {t.found for t in texts} == {expected}
    assert {t.tokens for t in texts} == {STEPS} and order[STEPS + 1] == tokenizer.token_to_id(END)
    assert all(t.prompt.endswith(f"{START}assistant\n") for t in texts)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "llama"])
def test_other_families(store: Path, family: str) -> None:
    subject = tiny_subject(store, family)
    wanted = [("untied", "fp32"), ("shared", "int8")]
    matrix = run_matrix(
        [subject],
        store=store,
        runtimes=["transformers", "onnxruntime", "genai"],
        skip=lambda row, _: None if (row.layout, row.precision) in wanted else "another test's",
        processes=0,
    )
    assert [(c.name, c.reasons) for c in matrix.cells if c.red] == [] and matrix.count("passed") == 5


def test_text_of_rounded_weights_is_compared_with_the_same_bundle(matrix: Matrix) -> None:
    for precision, reference in (("fp32", "golden record"), ("int8", "onnxruntime on the same bundle")):
        text = matrix.cell(row_of("tiny-llama", "shared", precision), "genai").text
        assert text is not None and text.reference == reference


def test_the_object_fits_its_schema(matrix: Matrix, tmp_path: Path) -> None:
    import jsonschema

    assert SCHEMA_PATH.read_text() == schema_text(), "python -m pit_deploy.matrix.table writes it"
    written, page = write_matrix(matrix, tmp_path)
    data = json.loads(written.read_text())
    jsonschema.Draft202012Validator(json.loads(SCHEMA_PATH.read_text())).validate(data)
    assert read_matrix(data) == matrix
    fields = {
        n for part in [data_schema(), *data_schema()["$defs"].values()] for n in part.get("properties", {})
    }
    text = (CHECKOUT / "docs" / "parity.md").read_text()
    assert [name for name in sorted(fields) if f"`{name}`" not in text] == []
    check_page(page, matrix)


def data_schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(SCHEMA_PATH.read_text())
    return schema


def check_page(page: Path, matrix: Matrix) -> None:
    """Self-contained, and every cell is a link to a section of its own with its plots or its reason."""
    from html.parser import HTMLParser

    class Reader(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.ids: list[str] = []
            self.links: list[str] = []
            self.tags: list[str] = []
            self.sources: list[str] = []

        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            found = dict(attributes)
            self.tags.append(tag)
            if tag == "section" and found.get("id"):
                self.ids.append(str(found["id"]))
            if tag == "a":
                self.links.append(str(found.get("href")))
            self.sources += [
                str(v) for k, v in attributes if k in ("src", "data") or (k == "href" and tag != "a")
            ]

    reader = Reader()
    text = page.read_text(encoding="utf-8")
    reader.feed(text)
    assert (
        reader.sources == [] and "script" not in reader.tags and "http" not in text.replace("http-equiv", "")
    )
    names = [cell.name for cell in matrix.cells]
    assert reader.ids == names and {f"#{name}" for name in names} <= set(reader.links)
    compared = [cell.logits for cell in matrix.cells if cell.logits is not None]
    assert text.count("<svg") == sum(3 if found.layers else 2 for found in compared)
    assert 'name="viewport"' in text and "max-width" in text


# What is damaged, and which cells must be red for it. Bundles are copied; hashes are made to match where said.


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Nine layers in fp32 and int8 ONNX bundles, so that there is a layer 7."""
    from pit_deploy import convert

    room = tmp_path_factory.mktemp("deep")
    write_tiny(room / "plain", layers=9)
    convert(room / "plain", room / "pit", check=False)
    export(room / "pit", room / "fp32", weights="fp32")
    export(room / "pit", room / "int8")
    return Subject("deep", room / "pit", (room / "fp32", room / "int8"))


FP32, INT8 = row_of("deep", "shared", "fp32"), row_of("deep", "shared", "int8")


def red_cells(subject: Subject, store: Path) -> dict[tuple[str, str], tuple[str, ...]]:
    """Reasons by precision and runtime. Cells without a bundle do not run; all others pass."""
    matrix = run_matrix([subject], store=store, runtimes=IN_PROCESS, processes=0)
    ran = [c for c in matrix.cells if c.status != "not_run"]
    assert {c.runtime for c in ran} == set(IN_PROCESS) and not matrix.passed
    return {(c.row.precision, c.runtime): c.reasons for c in ran if c.red}


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_zeroed_block_of_layer_7(deep: Subject, tmp_path: Path, store: Path, precision: str) -> None:
    red = red_cells(broken(deep, tmp_path, zero_layer_7, precision), store)
    assert set(red) == {(precision, "onnxruntime"), (precision, "genai")}
    assert any("hidden state out of tolerance is that of layer 7" in r for r in red[precision, "onnxruntime"])
    # The client does what the bundle says, and the bundle is wrong: its text alone would not show it.
    assert red[precision, "genai"][0].startswith("the same bundle is red in onnxruntime: ")
    assert "layer 7" in red[precision, "genai"][0]


def other_end_id(name: str) -> Callable[[Path], None]:
    """Swap the end id of one file for another printable token."""

    def damage(bundle: Path) -> None:
        found = json.loads((bundle / name).read_text())
        place = {"genai_config.json": found.get("model", {}), "manifest.json": found}.get(name, found)
        key = "end_ids" if name == "manifest.json" else "eos_token_id"
        place[key] = [5, *place[key][1:]]
        (bundle / name).write_text(json.dumps(found))
        if name != "manifest.json":
            match_hashes(bundle)

    return damage


@pytest.mark.parametrize(
    ("name", "runtimes", "cause"),
    [
        (
            "manifest.json",
            {"onnxruntime", "genai"},
            r"ends a text at \[5, .* by its manifest, and at \[275, ",
        ),
        (
            "generation_config.json",
            {"onnxruntime", "genai"},
            r"generation_config.json is not the checkpoint's: eos_",
        ),
        (
            "genai_config.json",
            {"genai"},
            r"genai_config.json ends a text at \[5, .*, and the manifest at \[275, ",
        ),
    ],
)
def test_a_swapped_end_id(
    deep: Subject, tmp_path: Path, store: Path, name: str, runtimes: set[str], cause: str
) -> None:
    import re

    red = red_cells(broken(deep, tmp_path, other_end_id(name)), store)
    assert set(red) == {("fp32", runtime) for runtime in runtimes}
    for reasons in red.values():
        assert re.search(cause, reasons[0]), reasons


def test_end_ids_swapped_everywhere_are_seen_without_the_checkpoint(deep: Subject, tmp_path: Path) -> None:
    """All files agree on other ids: the text of the record ends elsewhere."""

    def damage(bundle: Path) -> None:
        for name in ("generation_config.json", "config.json", "genai_config.json", "manifest.json"):
            found = json.loads((bundle / name).read_text())
            if name == "manifest.json":
                found["end_ids"] = [187, 6]
            elif name == "genai_config.json":
                found["model"]["eos_token_id"] = [187, 6]
            else:
                found["eos_token_id"] = [187, 6]
            (bundle / name).write_text(json.dumps(found))
        config = json.loads((bundle / "tokenizer_config.json").read_text())
        config.pop("eos_token")
        (bundle / "tokenizer_config.json").write_text(json.dumps(config))
        match_hashes(bundle)

    subject = broken(deep, tmp_path, damage)
    with pytest.raises(
        BundleError, match=r"ends with id 275 after 41 tokens, which is no end id of the manifest"
    ):
        verify(subject.bundles[0])


def test_a_truncated_data_file(deep: Subject, tmp_path: Path, store: Path) -> None:
    def damage(bundle: Path) -> None:
        file = bundle / "model.onnx_data"
        file.write_bytes(file.read_bytes()[:-1])

    red = red_cells(broken(deep, tmp_path, damage, "int8"), store)
    assert set(red) == {("int8", "onnxruntime"), ("int8", "genai")}
    assert all("model.onnx_data has" in r[0] and "bytes, and the manifest says" in r[0] for r in red.values())


def test_a_tokenizer_with_one_merge_removed(deep: Subject, tmp_path: Path, store: Path) -> None:
    def damage(bundle: Path) -> None:
        tokenizer = json.loads((bundle / "tokenizer.json").read_text())
        assert tokenizer["model"]["merges"].pop(0) in ("t h", ["t", "h"])
        (bundle / "tokenizer.json").write_text(json.dumps(tokenizer))
        match_hashes(bundle)

    subject = broken(deep, tmp_path, damage)
    red = red_cells(subject, store)
    assert set(red) == {("fp32", "onnxruntime"), ("fp32", "genai")}
    for reasons in red.values():
        assert "tokenizer.json is not the checkpoint's: the merge 't h' is missing (" in reasons[0]
    # Without the checkpoint the check texts of the manifest show it.
    with pytest.raises(BundleError, match="encodes 'The quick brown fox"):
        verify(subject.bundles[0])


def test_a_client_that_stops_elsewhere_is_seen(
    deep: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that goes on after the end id, and one that stops before it, are out of tolerance."""
    from pit_deploy.runtimes import genai

    bundle = next(b for b in deep.bundles if b.name == "fp32")
    whole = verify_text(bundle, "genai")
    assert whole.passed and whole.ended
    for change, said in (
        (whole.found + "x", "goes on where an end id ends it: 'x'"),
        (whole.found[:-3], "stops after"),
    ):
        monkeypatch.setattr(genai.GenaiTextRunner, "_generate", lambda *_, change=change: change)
        assert said in verify_text(bundle, "genai").failures[0]


# The work itself: what is kept, and what a crash costs.


def test_an_interrupted_matrix_goes_on(
    deep: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    original = checks.check

    def counting(subject: Any, row: Any, column: Any, *rest: Any) -> Any:
        checked.append(f"{row.precision} {column.name}")
        if len(checked) == 3:
            raise KeyboardInterrupt
        return original(subject, row, column, *rest)

    monkeypatch.setattr(worker, "check", counting)
    with pytest.raises(KeyboardInterrupt):
        run_matrix([deep], store=tmp_path, runtimes=["onnxruntime", "genai"], processes=0)
    kept = list((tmp_path / "cells").glob("*.json"))
    assert len(kept) == 2
    monkeypatch.setattr(worker, "check", original)
    seen: list[tuple[int, int]] = []
    whole = run_matrix(
        [deep],
        store=tmp_path,
        runtimes=["onnxruntime", "genai"],
        processes=0,
        on_cell=lambda cell, done, total: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1] == len(whole.cells)
    monkeypatch.setattr(worker, "check", lambda *_: pytest.fail("checked again"))
    columns = choose_columns(["onnxruntime", "genai"])
    kept_cells = [c for row in (FP32, INT8) for c in worker.checked(Job(deep, row, columns), tmp_path)]
    assert [c.status for c in kept_cells] == ["passed"] * 4


def test_what_is_kept_is_forgotten_when_the_bundle_changes(
    deep: Subject, tmp_path: Path, store: Path
) -> None:
    columns = choose_columns(["onnxruntime"])
    changed = broken(deep, tmp_path, zero_layer_7)
    (first,) = worker.checked(Job(deep, FP32, columns), store)
    (second,) = worker.checked(Job(changed, FP32, columns), store)
    assert (first.status, second.status) == ("passed", "out_of_tolerance")


def test_a_process_that_dies_costs_one_cell(
    deep: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle's runtime ends the child process; the next column is checked by another."""
    monkeypatch.setattr(worker, "_serve", matrix_workers.dying)
    columns = choose_columns(["onnxruntime", "genai"])
    cells = list(run_in_processes([Job(deep, FP32, columns)], tmp_path, 1))
    assert [(c.runtime, c.status) for c in cells] == [("onnxruntime", "failed"), ("genai", "passed")]
    assert cells[0].reasons == ("the process of the check was ended by the signal SIGKILL",)


def test_a_cell_that_hangs_is_ended(deep: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_serve", matrix_workers.hanging)
    (cell,) = run_in_processes([Job(deep, FP32, choose_columns(["onnxruntime"]))], tmp_path, 1, seconds=1)
    assert cell.status == "failed" and "did not end in time and was stopped" in cell.reasons[0]


def test_an_absent_tool_is_a_reason_and_not_a_failure(
    deep: Subject, tmp_path: Path, monkeypatch: Any
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "onnxruntime_genai" else find(name, *a)
    )
    matrix = run_matrix([deep], store=tmp_path, runtimes=["genai"], processes=0)
    assert {c.status for c in matrix.cells} == {"not_run"} and not matrix.passed
    reasons = {c.reasons[0] for c in matrix.cells}
    assert "the package onnxruntime-genai is not installed; run: pip install 'pit-deploy[bench]'" in reasons


def test_columns_are_every_runtime_of_the_registry() -> None:
    from pit_deploy.runtimes import FIT, TEXT_FIT

    names = {column.name.split(":")[0] for column in all_columns()}
    assert names == {"torch", "transformers", *TEXT_FIT, *(n for fit in FIT.values() for n in fit)}
    with pytest.raises(InputError, match="there is no runtime 'onnx'; known are torch"):
        choose_columns(["onnx"])


def test_two_bundles_of_one_setting_are_refused(deep: Subject, tmp_path: Path) -> None:
    twice = Subject("deep", deep.source, (deep.bundles[0], deep.bundles[0]))
    matrix = run_matrix([twice], store=tmp_path, runtimes=["onnxruntime"], processes=0)
    cell = matrix.cell(FP32, "onnxruntime")
    assert cell.status == "failed" and "are the same setting" in cell.reasons[0]


def test_the_fast_matrix_leaves_slow_columns_to_one_family() -> None:
    web = next(c for c in all_columns() if c.name == "onnxruntime-web")
    assert fast_skip(row_of("tiny-llama", "shared", "int8"), web) is None
    assert "FULL=1" in str(fast_skip(row_of("tiny-qwen3", "shared", "int8"), web))


def test_the_command(tmp_path: Path, deep: Subject, capsys: pytest.CaptureFixture[str]) -> None:
    """As `make parity` calls it: exit status, files, and what is said."""
    options = ["--runtime", "onnxruntime", "--out", str(tmp_path / "out"), "--processes"]
    assert main(["--bundle", str(deep.bundles[0]), *options, "0"]) == 0
    assert capsys.readouterr().out.startswith("1 passed, 0 out of tolerance, 0 failed, 0 not run, in ")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["parity.html", "parity.json", "store"]
    assert main(["--source", "x"]) == 2
    assert "Error: --source belongs to --bundle" in capsys.readouterr().err
    shutil.copytree(deep.bundles[0], tmp_path / "copy")
    zero_layer_7(tmp_path / "copy")
    line = [sys.executable, str(CHECKOUT / "runtime_tests" / "matrix.py"), "--bundle", str(tmp_path / "copy")]
    done = subprocess.run([*line, *options, "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "layer 7" in done.stderr and done.stdout.startswith("0 passed, 1 out of")
