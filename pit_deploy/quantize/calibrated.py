"""From a folded model to quantised tensors that suit it: smoothing, error feedback, the search for precision.

The steps and their order are here; each has a module of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pit_deploy.errors import InputError
from pit_deploy.folding import FoldedModel, SharedTable, UntiedTables
from pit_deploy.progress import Progress, silent
from pit_deploy.quantize.basis import noise_factor, token_second_moment
from pit_deploy.quantize.error_feedback import FeedbackOptions, quantize_with_feedback
from pit_deploy.quantize.hessians import (
    TOKENS,
    WINDOW,
    calibration_windows,
    held_out_windows,
    in_threads,
    quantize_layers,
)
from pit_deploy.quantize.options import QuantizationOptions
from pit_deploy.quantize.plan import Encoder, QuantizationPlan, Rounded
from pit_deploy.quantize.precision_search import PrecisionChoice, choose_precision
from pit_deploy.quantize.sensitivity import FLOAT_BITS, Trial
from pit_deploy.quantize.smoothing import balanced, rotated
from pit_deploy.quantize.tensor import QuantizedTensor, row_chunks

if TYPE_CHECKING:
    from pit_deploy.runtimes.torch import TorchRuntime

BITS = {"int8": 8, "int4": 4}
EMBEDDING, HEAD, SHARED = "model.embed_tokens.weight", "lm_head.weight", "pit.table"
"""Names of the token tables as exporters know them; a shared table without maps goes by the embedding's."""

SEARCH_TOKENS = 1024
BALANCE_TOKENS = 2048
_HELD_OUT = 8  # one in so many calibration windows is kept for the search


@dataclass(frozen=True)
class States:
    """What a table needs to know of the model's use of it: see `pit_deploy.reference.Calibration`."""

    second_moment: np.ndarray
    probabilities: np.ndarray


@dataclass
class Quantized:
    """A model ready to be written: `plan` returns the prepared tensors of exactly this `model`."""

    model: FoldedModel
    plan: QuantizationPlan
    choice: PrecisionChoice | None = None


def quantize_model(
    model: FoldedModel,
    plan: QuantizationPlan,
    ids: Sequence[int],
    states: States | None = None,
    *,
    max_kl: float | None = None,
    max_bytes: int | None = None,
    fixed_bytes: int = 0,
    keep_float: bool = False,
    smooth: bool = True,
    tokens: int = TOKENS,
    feedback: FeedbackOptions | None = None,
    activations: int | None = None,
    encoder: Encoder | None = None,
    by_layer: bool = False,
    work: Path | str | None = None,
    progress: Progress = silent,
) -> Quantized:
    """Quantise what `plan` says is int8 or int4, with error feedback on windows of the calibration text `ids`.

    Apply it last: after the choice of the quantisation basis, before the exporter. With `max_kl` or
    `max_bytes` (the whole artifact's; `fixed_bytes` of it are not for us to choose) every group of matrices
    is int4 or int8 (or float, with `keep_float`), whatever the plan said; the search runs on a part of the
    text that the calibration doesn't see. `activations` is the block size of int8 activations to reckon with
    there. With an `encoder` a search chooses among the runtime's own forms instead, and nothing is fed back. `by_layer`
    ranks a layer's groups by one measurement (`Trial.groups`): a third of the time, and on the sample a choice 0.4 %
    larger. `work` keeps finished layers for a later call. Raises `InputError` for a gate that cannot be met.
    """
    from pit_deploy.runtimes.torch import open_folded

    search = max_kl is not None or max_bytes is not None
    ids = [i for i in ids if i < model.vocab_size]
    window = min(WINDOW, int(model.config.get("max_position_embeddings", WINDOW)))
    seen, unseen = held_out_windows(ids, every=_HELD_OUT, window=window) if search else (ids, [])
    if search and not unseen:
        raise InputError(
            f"the calibration text has {len(ids)} tokens of this model and a search keeps one in {_HELD_OUT} to "
            f"measure with; give a text of at least {_HELD_OUT} tokens."
        )
    windows = calibration_windows(seen, tokens=tokens, window=window)
    tables = _tables(model, states)  # their moments hold for the states as they were before a rotation
    if smooth and (plan.weights in BITS or search):
        model = smoothed(model, plan, seen, progress)
    reference = _exact_maps(model)
    candidates = (encoder.bits if encoder else (4, 8)) if search else ()
    weight_bits = () if encoder else candidates or _bits(plan.weights)
    table_bits = () if encoder else candidates or _bits(plan.tables)
    prepared: dict[str, Mapping[int, Rounded]] = {}
    runtime = None
    if encoder is not None:
        runtime = open_folded(reference)
        prepared = _encoded(reference, runtime, encoder, progress)
    for name, moment in tables.items() if table_bits else ():
        progress("tables", 0, 1)
        table = _table(model, name)
        prepared[name] = {
            bits: quantize_rows(table, moment, table_options(plan, bits, table.shape[1]), feedback)
            for bits in table_bits
        }
        progress("tables", 1, 1)
    if weight_bits:
        options = [_options(plan, bits) for bits in weight_bits]
        layers = quantize_layers(
            open_folded(reference),
            windows,
            lambda name: options,
            feedback=feedback,
            work=work,
            progress=progress,
        )
        for name, tensors in layers.items():
            prepared[name] = dict(zip(weight_bits, tensors, strict=True))
    if not search:
        chosen = {name: next(iter(tensors.values())) for name, tensors in prepared.items()}
        return Quantized(model, replace(plan, errors=[], prepared=chosen))
    trial_windows = calibration_windows(unseen, tokens=SEARCH_TOKENS, window=window)
    trial = Trial(runtime or open_folded(reference), trial_windows, prepared, activations=activations)
    del runtime  # the search lets go of its floats
    bits = (*candidates, FLOAT_BITS) if keep_float else candidates
    groups = trial.groups(bits, progress, by_layer=by_layer)
    choice = choose_precision(
        groups,
        trial.of_groups(groups),
        max_kl=max_kl,
        max_bytes=max_bytes,
        fixed_bytes=fixed_bytes,
        progress=progress,
    )
    chosen = {n: prepared[n][bits] for n, bits in choice.bits.items() if bits != FLOAT_BITS}
    return Quantized(
        model,
        replace(
            plan,
            weights=_coarsest(bits for n, bits in choice.bits.items() if n.startswith("model.layers.")),
            tables=_coarsest(bits for n, bits in choice.bits.items() if not n.startswith("model.layers.")),
            errors=[],
            prepared=chosen,
            bits=choice.bits,
        ),
        choice,
    )


def _encoded(
    model: FoldedModel, runtime: TorchRuntime, encoder: Encoder, progress: Progress
) -> dict[str, Mapping[int, Rounded]]:
    """Every matrix in each of the encoder's precisions; `runtime` runs `model`."""
    jobs = [(name, _table(model, name)) for name in _tables(model, None)]
    for number, layer in enumerate(runtime.decoder.layers):
        jobs += [
            (f"model.layers.{number}.{name}.weight", module.weight.detach().float().numpy())
            for name, module in layer.named_modules()
            if hasattr(module, "in_features")
        ]
    found: dict[str, Mapping[int, Rounded]] = {}
    for number, (name, weight) in enumerate(jobs):
        progress("quantise", number, len(jobs))
        found[name] = {bits: encoder.encode(name, weight, bits) for bits in encoder.bits}
    progress("quantise", len(jobs), len(jobs))
    return found


def smoothed(
    model: FoldedModel, plan: QuantizationPlan, ids: Sequence[int], progress: Progress = silent
) -> FoldedModel:
    """The same model, rotated, and with the channels of its MLPs levelled on the text `ids`."""
    from pit_deploy.runtimes.torch import open_folded

    model = rotated(model, block=plan.rotation_block)
    window = min(WINDOW, int(model.config.get("max_position_embeddings", WINDOW)))
    windows = calibration_windows(ids, tokens=BALANCE_TOKENS, window=window)
    return balanced(model, open_folded(_exact_maps(model)), windows, progress)


def quantize_rows(
    table: np.ndarray,
    moment: np.ndarray | None,
    options: QuantizationOptions,
    feedback: FeedbackOptions | None = None,
) -> QuantizedTensor:
    """`quantize_with_feedback` by chunks of rows, for tables too tall to hold several times. None: no moment."""
    moment = np.eye(table.shape[1]) if moment is None else moment
    chunks = list(row_chunks(len(table), 64))  # 4096 rows each
    parts: list[QuantizedTensor] = in_threads(
        lambda rows: quantize_with_feedback(table[rows], moment, options, feedback), chunks
    )
    points = [part.zero_points for part in parts if part.zero_points is not None]
    first = parts[0]
    return QuantizedTensor(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate(points) if points else None,
        first.bits,
        first.block_size,
        first.columns,
    )


def table_moment(tables: SharedTable, states: States) -> np.ndarray | None:
    """What rounding errors of the rows of a shared table meet: the head's states and the embedding's map.

    Both are weighed as in the choice of the basis. None for a table without maps: nothing is known of it.
    """
    if tables.head_map is None or tables.embedding_map is None:
        return None
    values, vectors = np.linalg.eigh(token_second_moment(tables.table, states.probabilities))
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    moment = np.zeros_like(root)
    for weight, factor in (
        (1.0, noise_factor(tables.head_map, states.second_moment)),
        (0.3, tables.embedding_map),
    ):
        moment += weight / np.linalg.norm(root @ factor, "nuc") ** 2 * (factor @ factor.T)
    return moment


def _tables(model: FoldedModel, states: States | None) -> dict[str, np.ndarray | None]:
    """The moments of the token tables, by the exporters' names."""
    tables = model.tables
    if isinstance(tables, UntiedTables):
        return {EMBEDDING: None, HEAD: None}
    plain = tables.head_map is None and tables.embedding_map is None
    return {EMBEDDING if plain else SHARED: None if states is None else table_moment(tables, states)}


def _table(model: FoldedModel, name: str) -> np.ndarray:
    tables = model.tables
    if isinstance(tables, SharedTable):
        return tables.table
    return tables.head if name == HEAD else tables.embedding


def _exact_maps(model: FoldedModel) -> FoldedModel:
    """The model with its maps in float64, as the reference in PyTorch computes."""
    tables = model.tables
    if not isinstance(tables, SharedTable) or tables.head_map is None or tables.embedding_map is None:
        return model
    maps = (tables.head_map.astype(np.float64), tables.embedding_map.astype(np.float64))
    return replace(model, tables=SharedTable(tables.table, *maps))


def _options(plan: QuantizationPlan, bits: int) -> QuantizationOptions:
    if bits in plan.grids:
        return plan.grids[bits]
    # Offsets pay at 4 bits; at 8 they are bytes for nothing.
    return QuantizationOptions(bits, plan.block_size, symmetric=plan.symmetric or bits == 8)


def table_options(plan: QuantizationPlan, bits: int, columns: int) -> QuantizationOptions:
    """How a token table of so many columns is rounded with error feedback."""
    if bits in plan.grids:
        return plan.grids[bits]
    # In the basis offsets gain a table next to nothing, and at 8 bits blocks of 64 nothing to speak of is lost.
    wide = bits == 8 and plan.block_size == 32 and columns % 64 == 0
    return QuantizationOptions(bits, 64 if wide else plan.block_size)


def _bits(precision: str) -> tuple[int, ...]:
    return (BITS[precision],) if precision in BITS else ()


def _coarsest(bits: object) -> str:
    least = min(bits)  # type: ignore[call-overload]
    return {4: "int4", 6: "int4", 8: "int8", FLOAT_BITS: "fp32"}[least]
