"""What a cell is: one artifact in one runtime, judged, with the cause named where it is red."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError, MissingExtraError, PitDeployError
from pit_deploy.gates import GATES
from pit_deploy.golden import GoldenRecord
from pit_deploy.matrix.artifacts import NoArtifact, Subject, carried_differences, prepare
from pit_deploy.matrix.table import Cell, Column, Row, Status, logits_of, text_of

THREADS = 1
SAME_BUNDLE = " on the same bundle"
"""How a reference that is a runtime, and not the record, is called."""


def check(subject: Subject, row: Row, column: Column, artifact: Path, store: Path) -> Cell:
    """Check one cell. Whatever goes wrong in the artifact or the runtime is in the cell; nothing is raised for it."""
    started = time.perf_counter()
    try:
        if column.target in ("fold", "hf"):
            found = _check_fold(subject, row, column, artifact, store)
        else:
            found = _check_bundle(subject, column, artifact)
    except (MissingExtraError, NoArtifact) as error:
        return empty_cell(row, column, "not_run", str(error))
    except PitDeployError as error:
        return empty_cell(row, column, "failed", str(error), artifact=artifact.name)
    except Exception as error:  # whatever a runtime raises belongs into the table, and the other cells follow
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return empty_cell(row, column, "failed", reason, artifact=artifact.name)
    emulated = bool(found.pop("emulated", False))
    return Cell(
        row=row,
        runtime=column.name,
        status="out_of_tolerance" if found["reasons"] else "passed",
        artifact=label(artifact),
        seconds=None if emulated else round(time.perf_counter() - started, 2),
        **found,
    )


def empty_cell(row: Row, column: Column, status: Status, reason: str, *, artifact: str | None = None) -> Cell:
    """A cell without figures."""
    return Cell(
        row=row,
        runtime=column.name,
        status=status,
        reasons=(reason,),
        artifact=artifact,
        artifact_bytes=None,
        logits=None,
        text=None,
        notes=(),
        seconds=None,
    )


def label(artifact: Path) -> str:
    """The name of an artifact for people: a kept one is called by its folder in the store."""
    return artifact.parent.name if artifact.name == "bundle" else artifact.name


def _check_bundle(subject: Subject, column: Column, artifact: Path) -> dict[str, Any]:
    """`verify` in one of its forms, and before it the files that an export carries."""
    from pit_deploy.parity import verify
    from pit_deploy.text_parity import verify_text

    bundle = Bundle.open(artifact)
    different = carried_differences(bundle, subject.source) if subject.source is not None else []
    if different:
        raise InputError(f"{artifact}: {'; '.join(different)}; export the bundle again.")
    size = bundle.total_bytes
    if column.gives == "text":
        text = verify_text(bundle, column.name, threads=THREADS)
        return {
            "reasons": tuple(text.failures),
            "artifact_bytes": size,
            "logits": None,
            "text": text_of(text),
            "notes": _few_tokens(text.tokens),
        }
    report = verify(bundle, runtime=column.name, layers=True, threads=THREADS)
    if not report.answered:
        raise PitDeployError("; ".join(report.failures))
    return {
        "reasons": tuple(report.failures),
        "artifact_bytes": size,
        "logits": logits_of(report),
        "text": None,
        "notes": tuple(report.notes),
        "emulated": column.name.startswith("arm64-"),
    }


def _few_tokens(tokens: int) -> tuple[str, ...]:
    return (f"a near tie after {tokens} tokens ends the comparison",) if tokens < 16 else ()


def _check_fold(subject: Subject, row: Row, column: Column, artifact: Path, store: Path) -> dict[str, Any]:
    """The fold in PyTorch, or as transformers opens it; its reference is the record of one of the subject's bundles."""
    from pit_deploy.checkpoint import open_checkpoint
    from pit_deploy.folding import load_folded
    from pit_deploy.parity import compare_with_golden, judge
    from pit_deploy.runtimes.torch import open_folded, open_plain
    from pit_deploy.text_parity import TextReport, recorded_text

    bundle = _recorded(subject, row, store)
    golden = GoldenRecord.load(bundle.path)
    manifest = bundle.manifest
    runtime: Any
    if column.target == "hf":
        runtime = open_plain(open_checkpoint(artifact), context_length=manifest.context_length)
    else:
        runtime = open_folded(
            load_folded(open_checkpoint(artifact), row.layout),
            context_length=manifest.context_length,
            tokenizer_length=manifest.tokenizer_length,
        )
    report = compare_with_golden(
        runtime,
        golden,
        GATES[row.precision],
        bundle=artifact.name,
        precision=row.precision,
        end_ids=manifest.end_ids,
    )
    judge(report, runtime, golden, layers=True)
    text = None
    if column.target == "hf":
        expected = recorded_text(bundle, golden)
        text = TextReport(
            bundle=artifact.name,
            runtime=column.name,
            precision=row.precision,
            prompt=golden.prompts[golden.greedy_prompt].text,
            expected=expected.text,
            found=transformers_text(
                artifact,
                golden.prompts[golden.greedy_prompt].text,
                expected.count,
                special=not manifest.chat_template,
            ),
            tokens=expected.tokens,
            required=GATES[row.precision].greedy,
            ended=expected.ended,
        )
        if text.required:
            text.judge()
    return {
        "reasons": (*report.failures, *(text.failures if text is not None else ())),
        "artifact_bytes": sum(p.stat().st_size for p in artifact.rglob("*") if p.is_file()),
        "logits": logits_of(report),
        "text": None if text is None else text_of(text),
        "notes": tuple(report.notes),
    }


def _recorded(subject: Subject, row: Row, store: Path) -> Bundle:
    """An undamaged bundle with the golden record of the subject's checkpoint; raises `NoArtifact` where none is."""
    if not subject.bundles:
        return Bundle.open(prepare(subject, row, "onnx", store))
    for path in subject.bundles:
        with contextlib.suppress(PitDeployError):
            bundle = Bundle.open(path)
            bundle.check_end_ids()
            for name in ("golden.json", "golden.safetensors"):
                bundle.check_hash(name)
            if subject.source is None or not carried_differences(bundle, subject.source):
                return bundle
    raise NoArtifact("none of the bundles is undamaged and carries a golden record")


def transformers_text(directory: Path, prompt: str, count: int, *, special: bool) -> str:
    """The greedy continuation that transformers itself makes of a folder: its tokenizer, cache, loop and end ids.

    `special` lets the tokenizer add its own special tokens, which a chat's text holds already.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=special)["input_ids"]
    with torch.no_grad():
        found = model.generate(ids, do_sample=False, max_new_tokens=count, pad_token_id=0)
    return str(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))


def follow_references(cells: list[Cell]) -> list[Cell]:
    """The same cells, where one that says less than others do passes only if those did.

    That is one whose reference is another runtime on the same bundle, and a text: few logits decide it.
    """
    places = {(cell.row, cell.runtime): cell for cell in cells}
    result = []
    for cell in cells:
        bases = [places.get((cell.row, name)) for name in _bases(cell)]
        red = next((base for base in bases if base is not None and base.red), None)
        if cell.status == "passed" and red is not None:
            reason = f"the same bundle is red in {red.runtime}: {'; '.join(red.reasons)}"
            cell = cell.model_copy(update={"status": "out_of_tolerance", "reasons": (reason,)})
        result.append(cell)
    return result


def _bases(cell: Cell) -> list[str]:
    """The runtimes of the same row that a cell relies on."""
    from pit_deploy.runtimes import FIT, TEXT_FIT, TEXT_KERNELS

    compared = cell.logits or cell.text
    if compared is None:
        return []
    names = []
    if compared.reference.endswith(SAME_BUNDLE):
        names.append(compared.reference.removesuffix(SAME_BUNDLE))
    if cell.runtime in TEXT_FIT:
        names += [FIT[TEXT_FIT[cell.runtime]][0], TEXT_KERNELS[cell.runtime]]
    return names
