"""Checkpoint to PIT checkpoint: the two tables become one memory and one transform, the backbone is carried.

The default keeps the model's function: a bridge `B = S²` beside `T = S` gives a tied source's logits back
(docs/pit.md). The paper's strict form drops the bridge and needs training afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pit_deploy.checkpoint import Checkpoint, iterate_backbone, open_checkpoint, outlier_rows
from pit_deploy.errors import InputError
from pit_deploy.extras import require
from pit_deploy.files import atomic_output, check_output, check_room
from pit_deploy.folding import copy_companions
from pit_deploy.initialize import (
    Interface,
    check_cholesky,
    check_finite,
    check_memory,
    inner_product,
    polar,
    random_orthonormal,
    scratch_scale,
)
from pit_deploy.json_files import write_json
from pit_deploy.progress import Progress, silent
from pit_deploy.weight_files import cast, check_dtype, write_safetensors

INITS = ("polar", "random")
CHECK_TOKENS = 256
EXACT = 1e-3
"""Largest logit change that a conversion of a tied source with its bridge is expected to stay below."""
_ORTHONORMAL = 1e-6
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass
class ConversionReport:
    """What `convert` did and measured. Losses are nats per token on the calibration text."""

    out: str
    init: str
    bridge: str
    memory: str
    vocab_size: int
    hidden_size: int
    condition: float | None = None
    interface_error_source: float | None = None
    interface_error: float | None = None
    bridge_residual: float | None = None
    loss_source: float | None = None
    loss: float | None = None
    max_logit_difference: float | None = None
    outlier_rows: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def lossy(self) -> bool:
        """Whether the source's function was given up: no matrix bridge, or one that leaves a residual."""
        exact = self.bridge == "matrix" and (self.bridge_residual or 0.0) <= 1e-6
        return self.init != "given" and not exact

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "lossy": self.lossy}


def convert(
    source: str | Path,
    out: str | Path,
    *,
    init: str = "polar",
    bridge: bool = True,
    memory: str = "stiefel",
    dtype: str | None = None,
    seed: int = 0,
    memory_key: str | None = None,
    cholesky_key: str | None = None,
    check: bool = True,
    overwrite: bool = False,
    progress: Progress = silent,
) -> ConversionReport:
    """Convert a checkpoint to PIT and write it to `out`.

    `init` polar takes the source's tables; random starts from an orthonormal memory, and from a random
    backbone too where the source holds only config.json. `bridge` false is the paper's strict form. `dtype`
    is that of the backbone (None: as stored). `memory_key` and `cholesky_key` read a PIT model trained
    elsewhere. `check` runs both models on the calibration text.

    The result is loaded again before it gets its name. Raises `InputError` and leaves what was there.
    """
    require("torch", "onnx")
    require("transformers", "onnx")
    _check_options(init, memory, dtype, memory_key, cholesky_key)
    check_output(out, overwrite=overwrite, source=source)
    checkpoint = open_checkpoint(source, weights=init != "random")
    try:
        if checkpoint.kind != "plain":
            raise InputError(
                f"{source} is a {checkpoint.kind} checkpoint already; convert takes the model it came from."
            )
        checkpoint.check_companions()
        if not checkpoint.tensors:
            report = _from_scratch(checkpoint, Path(out), bridge, memory, dtype, seed, overwrite)
        else:
            _check_headers(checkpoint, memory_key, cholesky_key, check=check)
            progress("convert", 0, 4)
            if memory_key and cholesky_key:
                interface, report = _from_elsewhere(checkpoint, memory_key, cholesky_key, out)
            elif init == "random":
                interface, report = _random(checkpoint, bridge, seed, out)
            else:
                interface, report = _polar(checkpoint, bridge, out)
            report.memory = memory
            progress("convert", 1, 4)
            needed = _needed_bytes(checkpoint, interface, dtype)
            check_room(out, needed)
            with atomic_output(out, overwrite=overwrite) as partial:
                _write(checkpoint, interface, memory, dtype, partial, skip={memory_key, cholesky_key})
                progress("convert", 2, 4)
                _measure(checkpoint, partial, report, check=check and not memory_key, progress=progress)
        report.notes = checkpoint.notes
        progress("convert", 4, 4)
        return report
    finally:
        checkpoint.close()


def _check_options(
    init: str, memory: str, dtype: str | None, memory_key: str | None, cholesky_key: str | None
) -> None:
    if init not in INITS:
        raise InputError(f"--init {init} is not known; choose {' or '.join(INITS)}.")
    if memory not in ("frozen", "stiefel"):
        raise InputError(f"--memory {memory} is not known; choose frozen or stiefel.")
    check_dtype(dtype)
    if bool(memory_key) != bool(cholesky_key):
        raise InputError("--memory-key and --cholesky-key belong together; give both.")
    if memory_key and init == "random":
        raise InputError("--init random and --memory-key exclude each other; give one of them.")


def _check_headers(
    checkpoint: Checkpoint, memory_key: str | None, cholesky_key: str | None, *, check: bool
) -> None:
    """All that can be known of the source before a weight is read or a model is built."""
    from pit_deploy.model import check_fits

    if "lm_head.bias" in checkpoint.tensors:
        raise InputError(
            f"{checkpoint.label}: lm_head.bias is a bias on the logits, which PIT has no place for."
        )
    if memory_key and cholesky_key:
        shape = _given_shape(checkpoint, memory_key, cholesky_key)
        check_fits(checkpoint, shape[0], skip={memory_key, cholesky_key})
        return
    if checkpoint.is_tokenized():
        checkpoint.check_vocabulary()
    checkpoint.check_width()
    check_fits(checkpoint)


def _given_shape(checkpoint: Checkpoint, memory_key: str, cholesky_key: str) -> tuple[int, ...]:
    """[V, d] of a memory trained elsewhere, which its factor fits."""
    for key in (memory_key, cholesky_key):
        if key not in checkpoint.tensors:
            raise InputError(f"{checkpoint.label}: the tensor {key} is missing.")
    shape, square = (checkpoint.tensors[key].shape for key in (memory_key, cholesky_key))
    if len(shape) != 2 or square != (shape[1],) * 2:
        raise InputError(
            f"{checkpoint.label}: {memory_key} {list(shape)} and {cholesky_key} {list(square)} do not fit "
            f"together; [V, d] and [d, d] are expected."
        )
    return shape


def _polar(checkpoint: Checkpoint, bridge: bool, out: str | Path) -> tuple[Interface, ConversionReport]:
    checkpoint.check_tables()
    table = checkpoint.read(checkpoint.head_key)
    factors = polar(table, name=f"{checkpoint.label}: {checkpoint.head_key}")
    report = _report(out, "polar", "matrix" if bridge else "none", factors.memory, factors.condition)
    report.outlier_rows = [int(i) for i in outlier_rows(table)]
    del table
    if report.outlier_rows:
        shown = ", ".join(map(str, report.outlier_rows[:8]))
        checkpoint.note(
            f"{len(report.outlier_rows)} rows of {checkpoint.head_key} stand out by their norm, perhaps never "
            f"trained: {shown}{', ...' if len(report.outlier_rows) > 8 else ''}"
        )
    matrix = factors.transform @ factors.transform
    if not checkpoint.tied:
        matrix, residual = _least_squares_bridge(checkpoint, factors.memory, factors.transform)
        if bridge:
            report.bridge_residual = residual
            checkpoint.note(
                f"the source has two tables, so the conversion is lossy: one bridge leaves {residual:.1%} of the "
                f"embedding unexplained"
                if residual > 1e-6
                else "the source has two tables, which one bridge joins exactly"
            )
    # B = Wᵀ E_in in both cases, and so the source's own interface error is its distance from I.
    report.interface_error_source = float(np.linalg.norm(matrix - np.eye(len(matrix))) / np.sqrt(len(matrix)))
    cholesky = np.linalg.cholesky(factors.transform)
    return Interface(factors.memory, cholesky, matrix if bridge else None), report


def _least_squares_bridge(
    checkpoint: Checkpoint, memory: np.ndarray, transform: np.ndarray
) -> tuple[np.ndarray, float]:
    """`B = Wᵀ E_in`, which minimises `||Z T⁻¹ B - E_in||`, and what it leaves, relative to `||E_in||`."""
    embedding = checkpoint.read(checkpoint.embedding_key)
    check_finite(embedding, f"{checkpoint.label}: {checkpoint.embedding_key}")
    inner = inner_product(memory, embedding)
    # Z has orthonormal columns, so `Z inner` is the part of E_in in their span, and the rest is out of reach.
    left = total = 0.0
    for start in range(0, len(memory), 8192):
        rows = embedding[start : start + 8192].astype(np.float64)
        total += float((rows**2).sum())
        left += float(((rows - memory[start : start + 8192] @ inner) ** 2).sum())
    return transform @ inner, float(np.sqrt(left / total)) if total else 0.0


def _random(
    checkpoint: Checkpoint, bridge: bool, seed: int, out: str | Path
) -> tuple[Interface, ConversionReport]:
    rows, columns = checkpoint.tensors[checkpoint.embedding_key].shape
    interface = _scratch_interface(rows, columns, bridge, seed)
    return interface, _report(out, "random", interface.bridge_kind, interface.memory, 1.0)


def _scratch_interface(rows: int, columns: int, bridge: bool, seed: int) -> Interface:
    scale, multiplier = scratch_scale(rows, columns)
    memory = random_orthonormal(rows, columns, seed=seed)
    return Interface(memory, np.sqrt(scale) * np.eye(columns), multiplier if bridge else None)


def _from_elsewhere(
    checkpoint: Checkpoint, memory_key: str, cholesky_key: str, out: str | Path
) -> tuple[Interface, ConversionReport]:
    memory = check_memory(checkpoint, memory_key, _ORTHONORMAL)
    cholesky = checkpoint.read(cholesky_key, np.float64)
    name = f"{checkpoint.label}: {cholesky_key}"
    check_finite(cholesky, name)
    if np.triu(cholesky, 1).any() and np.allclose(cholesky, cholesky.T, rtol=1e-4, atol=0):
        checkpoint.note(f"{cholesky_key} is symmetric: it is taken as T and factored")
        try:
            cholesky = np.linalg.cholesky(cholesky)
        except np.linalg.LinAlgError:
            raise InputError(f"{name} is symmetric but not positive definite.") from None
    check_cholesky(cholesky, name)
    condition = float(np.linalg.cond(cholesky) ** 2)
    return Interface(memory, cholesky, None), _report(out, "given", "none", memory, condition)


def _report(
    out: str | Path, init: str, bridge: str, memory: np.ndarray, condition: float
) -> ConversionReport:
    return ConversionReport(str(out), init, bridge, "", memory.shape[0], memory.shape[1], condition)


def _needed_bytes(checkpoint: Checkpoint, interface: Interface, dtype: str | None) -> int:
    backbone = sum(
        math.prod(info.shape) * (_BYTES[dtype] if dtype else info.itemsize)
        for info in (checkpoint.tensors[name] for name in iterate_backbone(checkpoint))
    )
    return backbone + interface.memory.nbytes + 2 * interface.cholesky.nbytes


def _write(
    checkpoint: Checkpoint,
    interface: Interface,
    memory: str,
    dtype: str | None,
    directory: Path,
    skip: set[str | None],
) -> None:
    import torch

    from pit_deploy.model import pit_config

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in iterate_backbone(checkpoint):
            if name not in skip:
                yield name, cast(name, checkpoint.read_finite(name), dtype)
        yield "pit.memory", torch.from_numpy(interface.memory)
        yield "pit.cholesky", torch.from_numpy(interface.cholesky.astype(np.float32))
        if isinstance(interface.bridge, np.ndarray):
            yield "pit.bridge", torch.from_numpy(interface.bridge.astype(np.float32))
        elif interface.bridge is not None:
            yield "pit.embedding_multiplier", torch.tensor(interface.bridge, dtype=torch.float32)

    config = {**checkpoint.backbone_config, "vocab_size": len(interface.memory)}
    if dtype:
        config["dtype"] = dtype
        config.pop("torch_dtype", None)  # the older name of the same field
    write_safetensors(directory, tensors())
    architectures = checkpoint.config.get("architectures")
    write_json(directory / "config.json", pit_config(config, memory, interface.bridge_kind, architectures))
    copy_companions(checkpoint.path, directory)


def _from_scratch(
    checkpoint: Checkpoint,
    out: Path,
    bridge: bool,
    memory: str,
    dtype: str | None,
    seed: int,
    overwrite: bool,
) -> ConversionReport:
    """A whole random model from a config.json: the library's initialisation, and the interface's own."""
    torch = require("torch", "onnx")
    from pit_deploy.interface import PITInterface
    from pit_deploy.model import PITForCausalLM, backbone_config, build_backbone

    config = backbone_config(checkpoint.backbone_config)
    rows, columns = int(config.vocab_size), int(config.hidden_size)
    if checkpoint.is_tokenized() and checkpoint.tokenizer_length() > rows:
        raise InputError(
            f"{checkpoint.label}: the tokenizer knows {checkpoint.tokenizer_length()} ids and vocab_size is "
            f"{rows}; raise vocab_size in config.json."
        )
    check_room(out, rows * columns * 4)  # at the least; refuses a vocab_size that is a slip of the pen
    parts = _scratch_interface(rows, columns, bridge, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = build_backbone(
            checkpoint.backbone_config, rows, getattr(torch, dtype or "float32"), initialize=True
        )
    interface = PITInterface(
        torch.from_numpy(parts.memory),
        torch.from_numpy(parts.cholesky.astype(np.float32)),
        None if parts.bridge is None else torch.tensor(parts.bridge, dtype=torch.float32),
        memory_kind=memory,
    )
    with atomic_output(out, overwrite=overwrite) as partial:
        PITForCausalLM(backbone, interface).save_pretrained(partial, companions=checkpoint.path)
    report = _report(out, "random", parts.bridge_kind, parts.memory, 1.0)
    report.memory, report.interface_error = memory, interface.interface_error()
    checkpoint.note("the source has no weights: the backbone is random")
    return report


def _measure(
    checkpoint: Checkpoint, written: Path, report: ConversionReport, *, check: bool, progress: Progress
) -> None:
    """delta_TI of the result, and loss and logits of both models on the calibration text."""
    import torch

    from pit_deploy.model import PITForCausalLM
    from pit_deploy.runtimes.torch import TorchRuntime, open_plain

    opened = open_checkpoint(written, label=checkpoint.label)
    converted = PITForCausalLM.from_pretrained(opened, dtype=torch.float32)
    for note in opened.notes:
        checkpoint.note(note)
    report.interface_error = converted.pit.interface_error()
    if not check or not checkpoint.is_tokenized():
        if check:
            checkpoint.note("there is no tokenizer.json, so the conversion was not checked on text")
        return
    from pit_deploy.bundle import load_tokenizer
    from pit_deploy.quantize.calibration import calibration_text

    tokenizer = load_tokenizer(checkpoint.path / "tokenizer.json")
    tokens = checkpoint.tokenizer_length()
    runtime = TorchRuntime(converted, name="pit", tokenizer_length=tokens)
    ids = tokenizer.encode(calibration_text()).ids[: min(CHECK_TOKENS, runtime.context_length)]
    if not ids:
        checkpoint.note(
            "the tokenizer makes no tokens of English text, so the conversion was not checked on it"
        )
        return
    logits = runtime.all_logits(ids)
    del runtime, converted
    progress("convert", 3, 4)
    reference = open_plain(checkpoint).all_logits(ids)
    if len(ids) > 1:
        report.loss, report.loss_source = mean_loss(logits, ids), mean_loss(reference, ids)
    report.max_logit_difference = float(np.abs(logits - reference).max())
    if not report.lossy and not report.max_logit_difference <= EXACT:
        checkpoint.note(
            f"logits moved by up to {report.max_logit_difference:.2g} (expected below {EXACT:g}): the table's "
            f"condition number {report.condition:.3g} costs the interface's float32 that much"
        )


def mean_loss(logits: np.ndarray, ids: list[int]) -> float:
    """Mean next-token loss in nats: logits [tokens, V] of `ids` [tokens]; nan for a single token."""
    losses = [
        float(np.log(np.exp(row.astype(np.float64) - row.max()).sum()) + row.max() - row[following])
        for row, following in zip(logits, ids[1:], strict=False)
    ]
    return float(np.mean(losses)) if losses else float("nan")
