"""Checkpoint to bundle: fold, choose the quantisation basis, let an exporter write, record, describe.

The steps and their order are here; what a runtime's file looks like is the exporter's (entry points
`pit_deploy.exporters`).
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np

from pit_deploy.architecture import DecoderConfig
from pit_deploy.bundle import carry_files, write_manifest
from pit_deploy.checkpoint import Checkpoint, check_backbone_tensors, open_checkpoint
from pit_deploy.description import describe
from pit_deploy.errors import InputError
from pit_deploy.export_options import Exporter, ExportOptions
from pit_deploy.extras import require
from pit_deploy.files import atomic_output, check_output, check_room
from pit_deploy.folding import FoldedModel, SharedTable, check_shareable, load_folded, with_tables
from pit_deploy.generation_config import check_generation_config, checkpoint_bos_id, checkpoint_end_ids
from pit_deploy.json_files import write_json
from pit_deploy.progress import Progress, silent
from pit_deploy.quantize.nested import MISS_RATE, NestedHead
from pit_deploy.quantize.options import QuantizationOptions
from pit_deploy.quantize.plan import Encoder, QuantizationPlan
from pit_deploy.quantize.precision_search import PrecisionChoice
from pit_deploy.quantize.sensitivity import WHOLE_ROW
from pit_deploy.quantize.smoothing import turned_projection
from pit_deploy.reference import DRAWN_WINDOWS, HELD_OUT_TOKENS, Calibration, calibrate
from pit_deploy.sample import cache_folder

RTN_BLOCK = 32
FEEDBACK_BLOCK = 64
"""Weights that share a scale where nothing is asked for. Error feedback makes up for the coarser blocks, and ONNX
Runtime's kernels are a fifth faster with them."""


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
    choice: dict[str, Any] | None = None
    """What a search chose: bits, bytes and KL by group (`--max-kl`, `--max-bytes`)."""
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


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
    block_size: int | None = None,
    symmetric: bool | None = None,
    quantizer: str | None = None,
    max_kl: float | None = None,
    max_bytes: int | None = None,
    nested_head: bool | None = None,
    miss_rate: float | None = None,
    head_columns: int | None = None,
    shortlist: int | None = None,
    calibration: str | Path | None = None,
    golden: str | Path | Calibration | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> ExportReport:
    """Export a PIT, folded or plain checkpoint and write it to `out`.

    `block_size` None is 32, or 64 with error feedback in ONNX. `golden` is the PIT checkpoint to record from when
    the source is folded already, or a `Calibration` made before (`calibrate`; with error feedback pass it
    `drawn_windows=DRAWN_WINDOWS` for what an export itself would see). Everything that can be checked is
    checked before weights are read; a failed or interrupted export leaves nothing at `out`, and one with error
    feedback goes on where it was when it is called again. Raises `InputError`.
    """
    exporter = find_exporter(to)
    options = _resolve(
        exporter,
        block_size,
        ExportOptions(
            to=to,
            weights=weights,
            tables=tables,
            layout=layout,
            context=context,
            logits=logits,
            profile=profile,
            block_size=RTN_BLOCK if block_size is None else block_size,
            symmetric=symmetric,
            quantizer=quantizer,
            max_kl=max_kl,
            max_bytes=max_bytes,
            nested_head=nested_head,
            miss_rate=miss_rate,
            head_columns=head_columns,
            shortlist=shortlist,
        ),
    )
    if isinstance(golden, Calibration) and calibration is not None:
        raise InputError(
            "calibration has no effect beside a Calibration made before; give its text to calibrate."
        )
    recorded = golden if isinstance(golden, (str, Path)) else None
    check_output(out, overwrite=overwrite, source=source, inputs=(recorded, calibration))
    checkpoint = open_checkpoint(source)
    try:
        if not exporter.writes_bundle:
            return _export_plain(checkpoint, exporter, options, Path(out), overwrite, progress)
        config = DecoderConfig.from_hf(checkpoint.backbone_config)
        check_backbone_tensors(checkpoint, config)
        config = replace(config, vocab_size=checkpoint.table_rows)
        exporter.check(config, options)
        check_shareable(checkpoint, layout)
        _check_nested_head(checkpoint, config, options)
        checkpoint.check_tables()
        tokenizer_length = checkpoint.check_vocabulary()
        ends = checkpoint_end_ids(checkpoint)
        check_generation_config(checkpoint)
        check_room(out, 2 * checkpoint.total_bytes)
        context_length = options.context_length(config)
        encoder = exporter.encoder(options)
        feeds_back = options.feedback and _is_quantized(options) and encoder is None
        if isinstance(golden, Calibration):
            learned = golden
            if len(learned.probabilities) != checkpoint.table_rows:
                raise InputError(
                    f"the Calibration given was made for {len(learned.probabilities)} table rows and {source} has "
                    f"{checkpoint.table_rows}; make it from this checkpoint."
                )
        else:
            learned = calibrate(
                checkpoint,
                context_length,
                text=calibration,
                reference=golden,
                drawn_windows=DRAWN_WINDOWS if feeds_back or options.searches or options.shortlists else 0,
                held_out_tokens=HELD_OUT_TOKENS if options.shortlists else 0,
                progress=progress,
            )
        work = _work_folder(source, options) if feeds_back else None
        model, plan, choice = quantized(
            load_folded(checkpoint, _layout(options, checkpoint, exporter), progress=progress),
            config,
            options,
            learned,
            grids=exporter.grids(options),
            encoder=encoder,
            work=work,
            progress=progress,
        )
        recorded_golden = replace(
            learned.golden, projection=turned_projection(model, learned.golden.projection)
        )
        with atomic_output(out, overwrite=overwrite) as partial:
            artifact = exporter.write(model, config, options, plan, tokenizer_length, partial, progress)
            _check_size(partial, options)
            carry_files(checkpoint.path, partial)
            write_json(partial / "config.json", model.config)
            exporter.finish(
                partial,
                config,
                context_length=context_length,
                bos_id=checkpoint_bos_id(checkpoint),
                end_ids=ends,
            )
            recorded_golden.save(partial)
            body = describe(
                checkpoint,
                model,
                config,
                options,
                plan,
                artifact,
                learned.golden,
                end_ids=ends,
                tokenizer_length=tokenizer_length,
                context_length=context_length,
                directory=partial,
            )
            manifest = write_manifest(partial, body)
        report = ExportReport(str(out), to, model.layout, plan.weights, plan.tables, context_length)
        report.parts = {f.path: f.size for f in manifest.files}
        report.parts["manifest.json"] = (Path(out) / "manifest.json").stat().st_size
        report.total_bytes = sum(report.parts.values())
        report.folds = model.folds
        summary = manifest.quantization_summary
        report.choice = None if choice is None else choice.to_dict()
        report.quantization = summary.model_dump() if summary else None
        report.notes = [*checkpoint.notes, *plan.notes, *artifact.notes]
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
        return report
    finally:
        checkpoint.close()


def quantized(
    model: FoldedModel,
    config: DecoderConfig,
    options: ExportOptions,
    learned: Calibration,
    *,
    grids: Mapping[int, QuantizationOptions] | None = None,
    encoder: Encoder | None = None,
    work: Path | None = None,
    progress: Progress = silent,
) -> tuple[FoldedModel, QuantizationPlan, PrecisionChoice | None]:
    """The model in the form that rounds best, the plan that rounds it, and the search's choice if there was one.

    The function stays what it was: a basis for the shared table, and rotations within blocks of channels.
    Float settings change nothing. `grids` has the granularity that the runtime insists on, by bits, `encoder` its own
    form of matrices of few bits, where it has one. Error feedback
    keeps finished layers in the folder `work`, from where an interrupted call goes on.
    """
    from pit_deploy.quantize.calibrated import States, quantize_model, smoothed
    from pit_deploy.quantize.smoothing import rotated

    weights, tables = options.weights or "fp32", options.tables or "fp32"
    four_bits = options.searches or "int4" in (weights, tables)
    symmetric = not (four_bits and options.feedback) if options.symmetric is None else options.symmetric
    plan = QuantizationPlan(weights, tables, options.block_size, symmetric or bool(grids), grids=grids or {})
    if not _is_quantized(options):
        return model, plan, None
    if options.shortlists:
        _choose_head_(plan, model, options, learned, progress)
    model = in_quantization_basis(model, plan, learned)
    if not options.feedback or (encoder is not None and not options.searches):
        if plan.rotation_block is None and plan.weights in ("int8", "int4"):
            ids = [i for i in learned.ids if i < model.vocab_size]
            return smoothed(model, plan, ids, progress), plan, None
        return rotated(model, block=plan.rotation_block), plan, None
    handed_over = [model]
    del model  # or its tables would stay in memory beside those of its other form
    result = quantize_model(
        handed_over.pop(),
        plan,
        learned.ids,
        States(learned.state_second_moment, learned.probabilities),
        max_kl=options.max_kl,
        max_bytes=options.max_bytes,
        fixed_bytes=_unquantised_bytes(config, options),
        activations={"onnx": options.block_size, "executorch": WHOLE_ROW}.get(options.to),
        encoder=encoder,
        by_layer=options.to == "coreml",
        work=work,
        progress=progress,
    )
    return result.model, result.plan, result.choice


def _check_nested_head(checkpoint: Checkpoint, config: DecoderConfig, options: ExportOptions) -> None:
    """Refuse, before any work, a nested head that this checkpoint or these options cannot have."""
    if not options.shortlists:
        return
    integer = options.searches or options.tables in ("int8", "int4")
    if checkpoint.kind == "plain" or options.layout == "untied" or not integer:
        raise _no_nested_head(options.layout or "its own", str(options.tables))
    if options.head_columns is not None and options.shortlist is not None:
        head = NestedHead(options.head_columns, options.shortlist)
        head.check(checkpoint.table_rows, config.hidden_size, options.block_size)


def _no_nested_head(layout: str, tables: str) -> InputError:
    return InputError(
        f"a nested head needs one integer table of a PIT model, and this export has layout {layout} with "
        f"--tables {tables}; convert the model first, or pass --exact-head."
    )


def _choose_head_(
    plan: QuantizationPlan,
    model: FoldedModel,
    options: ExportOptions,
    learned: Calibration,
    progress: Progress,
) -> None:
    """Put a nested head into `plan` where one was asked for and is good enough, and a note of the choice."""
    from pit_deploy.quantize.calibrated import table_options
    from pit_deploy.quantize.nested_choice import choose_nested_head, measured

    tables = model.tables
    if plan.tables not in ("int8", "int4") or not isinstance(tables, SharedTable) or tables.head_map is None:
        raise _no_nested_head(model.layout, plan.tables)
    rows, columns = tables.table.shape
    candidates = (4, 8) if options.searches else (int(plan.tables.removeprefix("int")),)
    rounding = [table_options(plan, b, columns) if options.feedback else plan.options(b) for b in candidates]
    block = max(r.block_size_for(columns) for r in rounding)
    about = (tables, learned.state_second_moment)
    held_out = np.zeros((0, columns)) if learned.held_out is None else learned.held_out
    known = learned.golden.tokenizer_length
    if options.head_columns is not None and options.shortlist is not None:
        plan.nested = NestedHead(options.head_columns, options.shortlist)
        plan.nested.check(rows, columns, block)
        plan.nested, note = measured(plan.nested, *about, held_out, known=known, progress=progress)
    else:
        plan.nested, note = choose_nested_head(
            *about,
            held_out,
            bits=max(candidates),
            block=block,
            miss_rate=MISS_RATE if options.miss_rate is None else options.miss_rate,
            known=known,
            progress=progress,
        )
    plan.notes.append(note)


def _work_folder(source: str | Path, options: ExportOptions) -> Path:
    """Where an interrupted export keeps its finished layers: in the cache, and gone once such an export is done.

    What lies there is taken up only by an export of the same weights, text and settings. A search with another
    limit goes on with the same layers.
    """
    limits = replace(options, max_kl=None, max_bytes=None)
    about = f"{Path(source).resolve()} {options.searches} {limits}"
    return cache_folder() / "quantize" / hashlib.sha256(about.encode()).hexdigest()[:16]


def _is_quantized(options: ExportOptions) -> bool:
    return options.searches or bool({options.weights, options.tables} & {"int8", "int4"})


def _check_size(directory: Path, options: ExportOptions) -> None:
    written = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    if options.max_bytes is not None and written > options.max_bytes:
        raise InputError(
            f"--max-bytes {options.max_bytes} was missed: the model's files have {written} bytes; ask for "
            f"{written - options.max_bytes} fewer."
        )


def _unquantised_bytes(config: DecoderConfig, options: ExportOptions) -> int:
    """What a model file holds besides its quantised matrices: maps, norms, rotary tables, graph and padding.

    A little more than it is, so that `--max-bytes` is kept: on the sample graph and padding take 15 kB a layer.
    """
    d, layers = config.hidden_size, config.num_hidden_layers
    rotary = options.context_length(config) * config.head_dim
    return 4 * (2 * d * d + (2 * layers + 1) * d + rotary) + 20_000 * layers + 100_000


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
        leading=None if plan.nested is None else plan.nested.columns,
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


def _resolve(exporter: Exporter, block_size: int | None, options: ExportOptions) -> ExportOptions:
    weights = options.weights or exporter.default_precision
    # Float weights with integer tables are seldom meant: unasked, the tables then follow the weights.
    tables = options.tables or (weights if weights in ("fp32", "fp16") else exporter.default_precision)
    profile = options.profile or exporter.profiles[0]
    if profile not in exporter.profiles:
        raise InputError(
            f"--profile {profile} is not known for {exporter.name}; choose one of {', '.join(exporter.profiles)}."
        )
    options = replace(options, weights=weights, tables=tables, profile=profile)
    wide = block_size is None and options.to == "onnx" and options.feedback
    return replace(options, block_size=FEEDBACK_BLOCK) if wide else options


def _layout(options: ExportOptions, checkpoint: Checkpoint, exporter: Exporter) -> str | None:
    """The layout asked for; unasked, the exporter's own, where a plain source with two tables keeps them."""
    if options.layout is not None or exporter.default_layout == "untied":
        return options.layout or "untied"
    return "shared" if checkpoint.kind == "pit" else None


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
    check_backbone_tensors(checkpoint, config)
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
        notes=notes,
    )
