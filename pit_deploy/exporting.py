"""Checkpoint to bundle: fold, choose the quantisation basis, let an exporter write, record, describe.

The steps and their order are here; what a runtime's file looks like is the exporter's (entry points
`pit_deploy.exporters`).
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pit_deploy.architecture import DecoderConfig
from pit_deploy.bundle import carry_files, load_tokenizer, sha256, tokenizer_checks, write_manifest
from pit_deploy.chat import render_directory, special_tokens
from pit_deploy.checkpoint import Checkpoint, open_checkpoint, read_json_if_there, write_json
from pit_deploy.errors import InputError
from pit_deploy.export_options import Artifact, Exporter, ExportOptions
from pit_deploy.extras import require
from pit_deploy.files import atomic_output, check_output, check_room
from pit_deploy.folding import FoldedModel, SharedTable, load_folded, with_tables
from pit_deploy.generation_config import bos_id, end_ids
from pit_deploy.golden import QUESTION, GoldenRecord, golden_prompts, logsumexp, record, versions
from pit_deploy.manifest import (
    Architecture,
    Golden,
    ManifestBody,
    Precision,
    QuantizationSummary,
    Source,
    SourceFile,
    State,
    TensorError,
    TokenizedText,
    Value,
)
from pit_deploy.progress import Progress, silent
from pit_deploy.quantize.plan import QuantizationPlan

if TYPE_CHECKING:
    from pit_deploy.runtimes.torch import TorchRuntime

CALIBRATION_TOKENS = 2048
_CALIBRATION_PROMPT = 256
_WEIGHT_FILES = ("*.safetensors", "config.json")


@dataclass
class ExportReport:
    """What `export` wrote."""

    out: str
    to: str
    layout: str
    weights: str
    tables: str
    context_length: int | None = None
    total_bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    """Bytes by file."""
    folds: list[str] = field(default_factory=list)
    quantization: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Calibration:
    """What an export learns from running the reference model once.

    `state_second_moment` is E[nᵀ n] [d, d] over the calibration text, `probabilities` [V] the mean next-token
    distribution there.
    """

    golden: GoldenRecord
    state_second_moment: np.ndarray
    probabilities: np.ndarray


def export(
    source: str | Path,
    out: str | Path,
    *,
    to: str = "onnx",
    weights: str | None = None,
    tables: str | None = None,
    layout: str | None = None,
    context: int | None = None,
    logits: str = "last",
    profile: str | None = None,
    block_size: int = 32,
    symmetric: bool = True,
    calibration: str | Path | None = None,
    golden: str | Path | Calibration | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> ExportReport:
    """Export a PIT, folded or plain checkpoint and write it to `out`.

    `golden` is the PIT checkpoint to record from when the source is folded already, or a `Calibration` made
    before (`calibrate`). Everything that can be checked is checked before weights are read; a failed or
    interrupted export leaves nothing behind. Raises `InputError`.
    """
    exporter = find_exporter(to)
    options = _resolve(
        exporter, ExportOptions(to, weights, tables, layout, context, logits, profile, block_size, symmetric)
    )
    check_output(out, overwrite=overwrite)
    checkpoint = open_checkpoint(source)
    try:
        if not exporter.writes_bundle:
            return _export_plain(checkpoint, exporter, options, Path(out), overwrite, progress)
        config = DecoderConfig.from_hf(checkpoint.backbone_config)
        config = replace(config, vocab_size=checkpoint.table_rows)
        exporter.check(config, options)
        _check_shared(checkpoint, layout)
        tokenizer_length = checkpoint.check_vocabulary()
        ends = _end_ids(checkpoint)
        check_room(out, 2 * checkpoint.total_bytes)
        context_length = options.context_length(config)
        if isinstance(golden, Calibration):
            learned = golden
        else:
            learned = calibrate(
                checkpoint, context_length, text=calibration, reference=golden, progress=progress
            )
        model = load_folded(checkpoint, _layout(options, checkpoint), progress=progress)
        plan = QuantizationPlan(options.weights or "fp32", options.tables or "fp32", block_size, symmetric)
        model = in_quantization_basis(model, plan, learned)
        with atomic_output(out, overwrite=overwrite) as partial:
            artifact = exporter.write(model, config, options, plan, tokenizer_length, partial, progress)
            carry_files(checkpoint.path, partial)
            write_json(partial / "config.json", model.config)
            exporter.finish(
                partial, config, context_length=context_length, bos_id=_bos_id(checkpoint), end_ids=ends
            )
            learned.golden.save(partial)
            body = _manifest(
                checkpoint,
                model,
                config,
                options,
                plan,
                artifact,
                learned.golden,
                ends,
                tokenizer_length,
                context_length,
                partial,
            )
            manifest = write_manifest(partial, body)
        report = ExportReport(str(out), to, model.layout, plan.weights, plan.tables, context_length)
        report.parts = {f.path: f.size for f in manifest.files}
        report.parts["manifest.json"] = (Path(out) / "manifest.json").stat().st_size
        report.total_bytes = sum(report.parts.values())
        report.folds = model.folds
        summary = manifest.quantization_summary
        report.quantization = summary.model_dump() if summary else None
        report.notes = [*checkpoint.notes, *artifact.notes]
        return report
    finally:
        checkpoint.close()


def calibrate(
    checkpoint: Checkpoint,
    context_length: int,
    *,
    text: str | Path | None = None,
    reference: str | Path | None = None,
    progress: Progress = silent,
) -> Calibration:
    """Run the reference model: record the golden record, and the statistics for the quantisation basis.

    The reference is the training-time forward of a PIT checkpoint (`reference` names it where `checkpoint` is
    folded), or transformers' forward of a plain one.
    """
    from pit_deploy.quantize.calibration import read_calibration
    from pit_deploy.runtimes.torch import open_plain, open_training

    recorded = checkpoint
    if reference is not None:
        recorded = open_checkpoint(reference)
        if recorded.kind != "pit":
            raise InputError(
                f"--golden {reference} is a {recorded.kind} checkpoint; name the PIT checkpoint it was folded from."
            )
        if recorded.table_rows != checkpoint.table_rows:
            raise InputError(
                f"--golden {reference} has {recorded.table_rows} table rows, the source {checkpoint.table_rows}."
            )
    elif checkpoint.kind == "folded":
        raise InputError(
            f"{checkpoint.path} is folded already, so the training-time outputs cannot be recorded from it; pass "
            f"--golden with the PIT checkpoint it was folded from."
        )
    calibration_text = read_calibration(text)
    tokenizer = load_tokenizer(checkpoint.path / "tokenizer.json")
    tokens = checkpoint.tokenizer_length()
    prompts, greedy = golden_prompts(
        tokenizer, context_length, chat_text=_chat_text(checkpoint), vocab_size=checkpoint.table_rows
    )
    opened = (
        open_training(recorded, context_length=context_length)
        if recorded.kind == "pit"
        else open_plain(recorded, context_length=context_length)
    )
    golden = record(
        opened,
        prompts,
        tokenizer_length=tokens,
        greedy_prompt=greedy,
        end_ids=_end_ids(checkpoint),
        progress=progress,
    )
    if recorded.kind == "pit":
        golden.how["float32_interface_max_abs"] = _float32_difference(opened, golden)
    moment, probabilities = _statistics(
        opened, tokenizer.encode(calibration_text).ids, checkpoint.table_rows, progress
    )
    return Calibration(golden, moment, probabilities)


def in_quantization_basis(model: FoldedModel, plan: QuantizationPlan, learned: Calibration) -> FoldedModel:
    """The same model with its shared table in the basis where quantisation noise hurts least.

    Plain checkpoints and float tables keep theirs: the first are exported as they are, the second need none.
    """
    from pit_deploy.quantize.basis import apply_basis, quantization_basis, token_second_moment

    tables = model.tables
    if plan.tables not in ("int8", "int4") or not isinstance(tables, SharedTable):
        return model
    if tables.head_map is None or tables.embedding_map is None:
        return model
    basis = quantization_basis(
        tables.head_map,
        tables.embedding_map,
        learned.state_second_moment,
        row_second_moment=token_second_moment(tables.table, learned.probabilities),
    )
    return with_tables(
        model,
        SharedTable(*apply_basis(tables.table, tables.head_map, tables.embedding_map, basis)),
        "quantization_basis",
    )


def exporter_names() -> list[str]:
    """The targets of `export --to` that are installed, sorted."""
    return sorted(entry.name for entry in entry_points(group="pit_deploy.exporters"))


def find_exporter(name: str) -> Exporter:
    """The exporter of a target. Raises `InputError` with the known ones, `MissingExtraError` for its packages."""
    for entry in entry_points(group="pit_deploy.exporters"):
        if entry.name == name:
            require("torch", entry.name if entry.name != "hf" else "onnx")
            exporter: Exporter = entry.load()()
            return exporter
    raise InputError(f"--to {name} is not known; this installation writes {', '.join(exporter_names())}.")


def _resolve(exporter: Exporter, options: ExportOptions) -> ExportOptions:
    weights = options.weights or exporter.default_precision
    # Float weights with integer tables are seldom meant: unasked, the tables then follow the weights.
    tables = options.tables or (weights if weights in ("fp32", "fp16") else exporter.default_precision)
    profile = options.profile or exporter.profiles[0]
    if profile not in exporter.profiles:
        raise InputError(
            f"--profile {profile} is not known for {exporter.name}; choose one of {', '.join(exporter.profiles)}."
        )
    return replace(options, weights=weights, tables=tables, profile=profile)


def _layout(options: ExportOptions, checkpoint: Checkpoint) -> str | None:
    """The layout asked for; unasked, a plain source with two tables keeps them."""
    if options.layout is not None:
        return options.layout
    return "shared" if checkpoint.kind == "pit" else None


def _check_shared(checkpoint: Checkpoint, layout: str | None) -> None:
    if (
        layout == "shared"
        and checkpoint.kind != "pit"
        and checkpoint.layout != "shared"
        and not checkpoint.tied
    ):
        raise InputError(
            f"{checkpoint.path}: config.json says tie_word_embeddings false and the checkpoint has two different "
            f"tables, so --layout shared cannot be written; pass --layout untied, or convert the model to PIT."
        )
    checkpoint.check_tables()


def _export_plain(
    checkpoint: Checkpoint,
    exporter: Exporter,
    options: ExportOptions,
    out: Path,
    overwrite: bool,
    progress: Progress,
) -> ExportReport:
    """A target that is a checkpoint and not a bundle."""
    config = DecoderConfig.from_hf(checkpoint.backbone_config)
    exporter.check(config, options)
    model = load_folded(checkpoint, options.layout or exporter.default_layout, progress=progress)
    plan = QuantizationPlan(options.weights or "fp32", options.tables or "fp32")
    with atomic_output(out, overwrite=overwrite) as partial:
        artifact = exporter.write(model, config, options, plan, model.vocab_size, partial, progress)
    parts = {p.relative_to(out).as_posix(): p.stat().st_size for p in sorted(out.rglob("*")) if p.is_file()}
    notes = [*checkpoint.notes, *artifact.notes]
    return ExportReport(
        str(out),
        options.to,
        model.layout,
        plan.weights,
        plan.tables,
        None,
        sum(parts.values()),
        parts,
        model.folds,
        None,
        notes,
    )


def _statistics(
    runtime: TorchRuntime, ids: list[int], rows: int, progress: Progress
) -> tuple[np.ndarray, np.ndarray]:
    """E[nᵀ n] and the mean next-token distribution, over windows spread evenly through the text."""
    ids = [i for i in ids if i < rows]
    if not ids:
        raise InputError("the calibration text has no tokens; give a longer one.")
    size = min(_CALIBRATION_PROMPT, runtime.context_length, len(ids))
    count = max(1, min(CALIBRATION_TOKENS, len(ids)) // size)
    starts = np.linspace(0, len(ids) - size, count).astype(int)
    moment, probabilities = np.zeros(()), np.zeros(rows)
    for number, start in enumerate(starts):
        progress("calibrate", number, count)
        states, logits = runtime.final_states(ids[start : start + size])
        moment = moment + states.T @ states
        for row in logits:
            probabilities += np.exp(row - logsumexp(row))
    progress("calibrate", count, count)
    return moment / (count * size), probabilities / (count * size)


def _float32_difference(runtime: TorchRuntime, golden: GoldenRecord) -> float:
    """What the reference's logits would differ by if its solves ran in float32."""
    prompt = max(golden.prompts, key=lambda p: len(p.ids))
    start = golden.starts[golden.prompts.index(prompt)]
    runtime.precise = False
    try:
        logits = runtime.all_logits(prompt.ids)
    finally:
        runtime.precise = True
    span = slice(start, start + len(prompt.ids))
    return float(
        np.abs(np.take_along_axis(logits, golden.top_ids[span], axis=1) - golden.top_logits[span]).max()
    )


def _token_files(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Any], Any]:
    generation = read_json_if_there(checkpoint.path / "generation_config.json")
    tokenizer_config = read_json_if_there(checkpoint.path / "tokenizer_config.json")
    return generation, tokenizer_config, load_tokenizer(checkpoint.path / "tokenizer.json").token_to_id


def _end_ids(checkpoint: Checkpoint) -> list[int]:
    generation, tokenizer_config, to_id = _token_files(checkpoint)
    found = end_ids(generation, checkpoint.config, tokenizer_config, to_id)
    wrong = [i for i in found if i >= checkpoint.tokenizer_length()]
    if wrong:
        raise InputError(
            f"{checkpoint.path}: the end id {wrong[0]} is not in the tokenizer ({checkpoint.tokenizer_length()} ids); "
            f"correct eos_token_id in generation_config.json or config.json."
        )
    return found


def _bos_id(checkpoint: Checkpoint) -> int | None:
    generation, tokenizer_config, to_id = _token_files(checkpoint)
    return bos_id(generation, checkpoint.config, tokenizer_config, to_id)


def _chat_text(checkpoint: Checkpoint) -> str | None:
    """A question in the model's own chat form; None where it has no template."""
    if not _has_chat_template(checkpoint.path):
        return None
    return render_directory(checkpoint.path, [{"role": "user", "content": QUESTION}])


def _has_chat_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").is_file():
        return True
    return bool(read_json_if_there(directory / "tokenizer_config.json").get("chat_template"))


def _manifest(
    checkpoint: Checkpoint,
    model: FoldedModel,
    config: DecoderConfig,
    options: ExportOptions,
    plan: QuantizationPlan,
    artifact: Artifact,
    golden: GoldenRecord,
    ends: list[int],
    tokenizer_length: int,
    context_length: int,
    directory: Path,
) -> ManifestBody:
    quantization = tuple(TensorError(**error) for error in plan.errors)
    tokenizer = load_tokenizer(directory / "tokenizer.json")
    specials = special_tokens(read_json_if_there(directory / "tokenizer_config.json"))
    return ManifestBody(
        created_by=versions(),
        source=_source(checkpoint),
        folds=tuple(model.folds),
        layout=model.layout,  # type: ignore[arg-type]  # checked by check_layout
        runtime=artifact.runtime,  # type: ignore[arg-type]  # the exporter's constant, validated by pydantic
        profile=artifact.profile,
        model_file=artifact.model_file,
        precision=Precision(**artifact.precision),
        architecture=Architecture(
            model_type=config.model_type,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
        ),
        inputs=tuple(Value(**v) for v in artifact.inputs),
        outputs=tuple(Value(**v) for v in artifact.outputs),
        states=tuple(State(**s) for s in artifact.states),
        hidden_states=tuple(artifact.hidden_states),
        logits=options.logits,  # type: ignore[arg-type]  # checked by ExportOptions
        vocab_size=config.vocab_size,
        tokenizer_length=tokenizer_length,
        context_length=context_length,
        bos_id=_bos_id(checkpoint),
        end_ids=tuple(ends),
        chat_template=_has_chat_template(directory),
        quantization=quantization,
        quantization_summary=QuantizationSummary.of(quantization),
        tokenizer_checks=tuple(tokenizer_checks(tokenizer, list(specials.values()))),
        golden=Golden(
            file="golden.safetensors",
            positions=golden.positions,
            prompts=tuple(TokenizedText(text=p.text, ids=tuple(p.ids)) for p in golden.prompts),
        ),
    )


def _source(checkpoint: Checkpoint) -> Source:
    files = sorted({p for pattern in _WEIGHT_FILES for p in checkpoint.path.glob(pattern)})
    return Source(
        name=checkpoint.name.replace("/", "--"),
        model_type=checkpoint.model_type,
        kind=checkpoint.kind,  # type: ignore[arg-type]  # one of the three words
        files=tuple(SourceFile(name=f.name, size=f.stat().st_size, sha256=sha256(f)) for f in files),
        license=_license(checkpoint.path),
    )


def _license(directory: Path) -> str | None:
    """The licence id of the model card's front matter."""
    with suppress(OSError, UnicodeDecodeError):
        text = (directory / "README.md").read_text(encoding="utf-8")
        front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
        found = re.search(r"^license:\s*['\"]?([\w.+-]+)", front.group(1), re.MULTILINE) if front else None
        return found.group(1) if found else None
    return None
