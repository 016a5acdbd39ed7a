"""Checkpoint to PIT checkpoint: the two tables become one memory and one transform, the backbone is carried.

The default keeps the model's function: a bridge `B = S²` beside `T = S` gives a tied source's logits back
(docs/pit.md). The paper's strict form drops the bridge and needs training afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pit_deploy.checkpoint import (
    Checkpoint,
    iterate_backbone,
    open_checkpoint,
    outlier_rows,
    write_json,
    write_safetensors,
)
from pit_deploy.errors import InputError
from pit_deploy.extras import require
from pit_deploy.files import atomic_output, check_output, check_room
from pit_deploy.folding import copy_companions
from pit_deploy.initialize import (
    check_finite,
    orthonormality_error,
    polar,
    random_orthonormal,
    reorthonormalize,
    scratch_scale,
)
from pit_deploy.progress import Progress, silent

INITS = ("polar", "random")
CHECK_TOKENS = 256
_FAR_FROM_ORTHONORMAL = 1e-2


@dataclass(frozen=True)
class Interface:
    """What a conversion decides: float32 `memory` [V, d], float64 `cholesky` [d, d], a bridge or None."""

    memory: np.ndarray
    cholesky: np.ndarray
    bridge: np.ndarray | float | None

    @property
    def bridge_kind(self) -> str:
        if self.bridge is None:
            return "none"
        return "matrix" if isinstance(self.bridge, np.ndarray) else "scalar"


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
        return self.bridge_residual is not None and self.bridge_residual > 1e-6

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
    backbone too where the source holds only config.json. `bridge` false is the paper's strict form. `dtype` is
    that of the backbone (None: as stored). `memory_key` and `cholesky_key` read a PIT model trained elsewhere.
    `check` runs both models on the calibration text. Raises `InputError` before any long work.
    """
    _check_options(init, memory, dtype, memory_key, cholesky_key)
    check_output(out, overwrite=overwrite)
    checkpoint = open_checkpoint(source, weights=init != "random")
    if checkpoint.kind != "plain":
        raise InputError(
            f"{source} is a {checkpoint.kind} checkpoint already; convert takes the model it came from."
        )
    if checkpoint.is_tokenized() and checkpoint.tensors and not memory_key:
        checkpoint.check_vocabulary()
    if not checkpoint.tensors:
        return _from_scratch(checkpoint, Path(out), bridge, memory, dtype or "float32", seed, overwrite)
    progress("convert", 0, 4)
    if memory_key and cholesky_key:
        interface, report = _from_elsewhere(checkpoint, memory_key, cholesky_key, out)
    elif init == "random":
        interface, report = _random(checkpoint, bridge, seed, out)
    else:
        interface, report = _polar(checkpoint, bridge, out)
    report.memory = memory
    progress("convert", 1, 4)
    _write(checkpoint, interface, memory, dtype, out, overwrite, skip={memory_key, cholesky_key})
    progress("convert", 2, 4)
    _measure(checkpoint, Path(out), report, check=check and not memory_key, progress=progress)
    report.notes = checkpoint.notes
    progress("convert", 4, 4)
    checkpoint.close()
    return report


def _check_options(
    init: str, memory: str, dtype: str | None, memory_key: str | None, cholesky_key: str | None
) -> None:
    if init not in INITS:
        raise InputError(f"--init {init} is not known; choose {' or '.join(INITS)}.")
    if memory not in ("frozen", "stiefel"):
        raise InputError(f"--memory {memory} is not known; choose frozen or stiefel.")
    if dtype not in (None, "float32", "float16", "bfloat16"):
        raise InputError(f"--dtype {dtype} is not known; choose float32, float16 or bfloat16.")
    if bool(memory_key) != bool(cholesky_key):
        raise InputError("--memory-key and --cholesky-key belong together; give both.")


def _polar(checkpoint: Checkpoint, bridge: bool, out: str | Path) -> tuple[Interface, ConversionReport]:
    checkpoint.check_tables()
    if "lm_head.bias" in checkpoint.tensors:
        raise InputError(
            f"{checkpoint.path}: lm_head.bias is a bias on the logits, which PIT has no place for."
        )
    table = checkpoint.read(checkpoint.head_key)
    factors = polar(table, name=checkpoint.head_key)
    report = _report(out, "polar", "matrix" if bridge else "none", factors.memory, factors.condition)
    gram = (factors.transform @ factors.transform) - np.eye(table.shape[1])
    report.interface_error_source = float(np.linalg.norm(gram) / np.sqrt(table.shape[1]))
    report.outlier_rows = [int(i) for i in outlier_rows(table)]
    if report.outlier_rows:
        shown = ", ".join(map(str, report.outlier_rows[:8]))
        checkpoint.note(
            f"{len(report.outlier_rows)} rows of {checkpoint.head_key} stand out by their norm, perhaps never "
            f"trained: {shown}{', ...' if len(report.outlier_rows) > 8 else ''}"
        )
    matrix: np.ndarray | None = None
    if bridge and checkpoint.tied:
        matrix = factors.transform @ factors.transform
    elif bridge:
        matrix, report.bridge_residual = _least_squares_bridge(checkpoint, factors.memory, factors.transform)
        checkpoint.note(
            f"the source has two tables, so the conversion is lossy: one bridge leaves {report.bridge_residual:.1%} "
            f"of the embedding unexplained"
        )
    return Interface(factors.memory, np.linalg.cholesky(factors.transform), matrix), report


def _least_squares_bridge(
    checkpoint: Checkpoint, memory: np.ndarray, transform: np.ndarray
) -> tuple[np.ndarray, float]:
    """`B = Wᵀ E_in`, which minimises `||Z T⁻¹ B - E_in||`, and the relative norm of what is left."""
    embedding = checkpoint.read(checkpoint.embedding_key)
    check_finite(embedding, checkpoint.embedding_key)
    inner = np.zeros_like(transform)
    for start in range(0, len(memory), 8192):
        inner += memory[start : start + 8192].astype(np.float64).T @ embedding[start : start + 8192].astype(
            np.float64
        )
    total = float(np.sum(np.square(embedding, dtype=np.float64)))
    # Z has orthonormal columns, so the part of E_in outside their span is what no bridge reaches.
    residual = np.sqrt(max(total - float(np.sum(inner**2)), 0.0) / total)
    return transform @ inner, float(residual)


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
    memory, cholesky = checkpoint.read(memory_key), checkpoint.read(cholesky_key, np.float64)
    if memory.ndim != 2 or cholesky.shape != (memory.shape[1],) * 2:
        raise InputError(
            f"{checkpoint.path}: {memory_key} {list(memory.shape)} and {cholesky_key} {list(cholesky.shape)} do "
            f"not fit together; [V, d] and [d, d] are expected."
        )
    check_finite(memory, memory_key)
    check_finite(cholesky, cholesky_key)
    error = orthonormality_error(memory)
    if error > _FAR_FROM_ORTHONORMAL:
        raise InputError(
            f"{checkpoint.path}: the columns of {memory_key} are {error:.3g} away from orthonormal (limit "
            f"{_FAR_FROM_ORTHONORMAL}); this is not a PIT memory."
        )
    if error > 1e-6:
        memory = reorthonormalize(memory)
        checkpoint.note(
            f"{memory_key} was {error:.2g} away from orthonormal columns and was re-orthonormalised"
        )
    if np.allclose(cholesky, cholesky.T) and np.triu(cholesky, 1).any():
        checkpoint.note(f"{cholesky_key} is symmetric: it is taken as T and factored")
        try:
            cholesky = np.linalg.cholesky(cholesky)
        except np.linalg.LinAlgError:
            raise InputError(
                f"{checkpoint.path}: {cholesky_key} is symmetric but not positive definite."
            ) from None
    if np.triu(cholesky, 1).any() or not (np.diagonal(cholesky) > 0).all():
        raise InputError(
            f"{checkpoint.path}: {cholesky_key} must be lower triangular with a positive diagonal."
        )
    singular = np.linalg.svd(cholesky, compute_uv=False)
    return Interface(memory, cholesky, None), _report(
        out, "polar", "none", memory, float((singular[0] / singular[-1]) ** 2)
    )


def _report(
    out: str | Path, init: str, bridge: str, memory: np.ndarray, condition: float
) -> ConversionReport:
    return ConversionReport(str(out), init, bridge, "", memory.shape[0], memory.shape[1], condition)


def _write(
    checkpoint: Checkpoint,
    interface: Interface,
    memory: str,
    dtype: str | None,
    out: str | Path,
    overwrite: bool,
    skip: set[str | None],
) -> None:
    import torch

    from pit_deploy.model import pit_config

    names = [n for n in iterate_backbone(checkpoint) if n not in skip]
    check_room(
        out, sum(checkpoint.tensors[n].file.stat().st_size for n in names[:1]) + interface.memory.nbytes
    )

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            tensor = checkpoint.read_torch(name)
            yield name, tensor.to(getattr(torch, dtype)) if dtype and tensor.is_floating_point() else tensor
        yield "pit.memory", torch.from_numpy(interface.memory)
        yield "pit.cholesky", torch.from_numpy(interface.cholesky.astype(np.float32))
        if interface.bridge_kind == "matrix":
            yield "pit.bridge", torch.from_numpy(np.asarray(interface.bridge, np.float32))
        elif interface.bridge_kind == "scalar":
            yield "pit.embedding_multiplier", torch.tensor(interface.bridge, dtype=torch.float32)

    config = {**checkpoint.backbone_config, "vocab_size": len(interface.memory)}
    if dtype:
        config["dtype"] = dtype
    with atomic_output(out, overwrite=overwrite) as partial:
        write_safetensors(partial, tensors())
        write_json(
            partial / "config.json",
            pit_config(config, memory, interface.bridge_kind, checkpoint.config.get("architectures")),
        )
        copy_companions(checkpoint.path, partial)


def _from_scratch(
    checkpoint: Checkpoint, out: Path, bridge: bool, memory: str, dtype: str, seed: int, overwrite: bool
) -> ConversionReport:
    """A whole random model from a config.json: the library's initialisation, and the interface's own."""
    torch, transformers = require("torch", "onnx"), require("transformers", "onnx")
    from pit_deploy.architecture import with_defaults
    from pit_deploy.interface import PITInterface
    from pit_deploy.model import PITForCausalLM

    full = with_defaults(checkpoint.backbone_config)
    rows, columns = int(full["vocab_size"]), int(full["hidden_size"])
    if checkpoint.is_tokenized() and checkpoint.tokenizer_length() > rows:
        raise InputError(
            f"{checkpoint.path}: the tokenizer knows {checkpoint.tokenizer_length()} ids and vocab_size is {rows}; "
            f"raise vocab_size in config.json."
        )
    torch.manual_seed(seed)
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[checkpoint.model_type].from_dict(
        checkpoint.backbone_config
    )
    config.tie_word_embeddings = False
    backbone = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    parts = _scratch_interface(rows, columns, bridge, seed)
    interface = PITInterface(
        torch.from_numpy(parts.memory),
        torch.from_numpy(parts.cholesky.astype(np.float32)),
        None if parts.bridge is None else torch.tensor(parts.bridge, dtype=torch.float32),
        memory_kind=memory,
    )
    model = PITForCausalLM(backbone, interface)
    model.save_pretrained(out, overwrite=overwrite, companions=checkpoint.path)
    report = _report(out, "random", parts.bridge_kind, parts.memory, 1.0)
    report.memory, report.interface_error = memory, interface.interface_error()
    report.notes = [*checkpoint.notes, "the source has no weights: the backbone is random"]
    return report


def _measure(
    checkpoint: Checkpoint, out: Path, report: ConversionReport, *, check: bool, progress: Progress
) -> None:
    """delta_TI of the result, and loss and logits of both models on the calibration text."""
    from pit_deploy.model import PITForCausalLM
    from pit_deploy.runtimes.torch import TorchRuntime, open_plain

    converted = PITForCausalLM.from_pretrained(out)
    report.interface_error = converted.pit.interface_error()
    if not check or not checkpoint.is_tokenized():
        if check:
            checkpoint.note("there is no tokenizer.json, so the conversion was not checked on text")
        return
    from tokenizers import Tokenizer

    from pit_deploy.quantize.calibration import calibration_text

    tokenizer = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
    ids = tokenizer.encode(calibration_text()).ids
    runtime = TorchRuntime(converted.float(), name="pit")
    ids = ids[: min(CHECK_TOKENS, runtime.context_length)]
    logits = runtime.all_logits(ids)
    del runtime, converted
    progress("convert", 3, 4)
    reference = open_plain(checkpoint).all_logits(ids)
    report.loss, report.loss_source = mean_loss(logits, ids), mean_loss(reference, ids)
    report.max_logit_difference = float(np.abs(logits - reference).max())


def mean_loss(logits: np.ndarray, ids: list[int]) -> float:
    """Mean next-token loss in nats: logits [tokens, V] of `ids` [tokens]."""
    if len(ids) < 2:
        return float("nan")
    shifted = logits[:-1].astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    chosen = shifted[np.arange(len(ids) - 1), ids[1:]]
    return float(np.mean(np.log(np.exp(shifted).sum(axis=1)) - chosen))
