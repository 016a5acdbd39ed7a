"""Compare a runtime with the training-time model: on the bundle's golden record, or in full with the source.

What is compared: every recorded position decoded step by step through the shipped graph, each prompt in one
pass, the greedy continuation, and layer by layer where the runtime can show its hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pit_deploy import few_passes
from pit_deploy.bundle import Bundle, sha256
from pit_deploy.checkpoint import Checkpoint, open_checkpoint
from pit_deploy.errors import InputError, ParityError, RuntimeDiedError
from pit_deploy.gates import TIE, Gate, coarsest, gate_of
from pit_deploy.golden import (
    MIN_POSITIONS,
    GoldenRecord,
    greedy_continuation,
    logsumexp,
    project,
)
from pit_deploy.progress import Progress, silent
from pit_deploy.runtimes.base import FullRuntime, Runtime

EVALUATION_TOKENS = 1024
_EVALUATION_PROMPT = 256


@dataclass(frozen=True)
class LayerError:
    """Relative error of the hidden state after a layer (0: the embedding): median and largest over positions."""

    layer: int
    median: float
    largest: float


@dataclass
class ParityReport:
    """The result of one comparison. Arrays are per position."""

    bundle: str
    runtime: str
    precision: str
    gate: Gate
    reference: str
    kl: np.ndarray
    max_abs: np.ndarray
    top1: np.ndarray
    """Whether the largest logit is the reference's, ties aside."""
    prompt_lengths: list[int]
    prefill_max_abs: float
    """Largest difference between one pass and step by step in the runtime itself."""
    greedy_tokens: int
    greedy_equal: int
    """Leading greedy tokens that agree (ties aside)."""
    layers: list[LayerError] = field(default_factory=list)
    load_rss_bytes: int | None = None
    total_bytes: int | None = None
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    answered: bool = True
    """False where the runtime's process died, so that no figure means anything."""

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    @property
    def worst_abs(self) -> float:
        return float(self.max_abs.max())

    @property
    def top1_rate(self) -> float:
        return float(self.top1.mean())

    @property
    def first_diverging_layer(self) -> int | None:
        """The first layer (0: the embedding) whose median error is past the gate."""
        return next((e.layer for e in self.layers if not e.median <= self.gate.layer), None)

    def to_dict(self) -> dict[str, Any]:
        """The object that `verify --json` writes (docs/cli.md)."""
        gate = self.gate
        return {
            "bundle": self.bundle,
            "runtime": self.runtime,
            "precision": self.precision,
            "reference": self.reference,
            "passed": self.passed,
            "failures": self.failures,
            "notes": self.notes,
            "positions": len(self.kl),
            "max_abs_logit_error": _number(self.worst_abs),
            "mean_kl": _number(self.mean_kl),
            "worst_kl": _number(float(self.kl.max())),
            "top1": self.top1_rate,
            "one_pass_against_steps_max_abs": _number(self.prefill_max_abs),
            "greedy_tokens": self.greedy_tokens,
            "greedy_equal": self.greedy_equal,
            "gate": {
                "max_abs": gate.max_abs,
                "mean_kl": gate.mean_kl,
                "top1": gate.top1,
                "greedy": gate.greedy,
                "layer": gate.layer,
            },
            "layers": [
                {"layer": e.layer, "median": _number(e.median), "largest": _number(e.largest)}
                for e in self.layers
            ],
            "first_diverging_layer": self.first_diverging_layer,
            "load_rss_bytes": self.load_rss_bytes,
            "total_bytes": self.total_bytes,
            "per_position": {
                "kl": _rounded(self.kl),
                "max_abs": _rounded(self.max_abs),
                "top1": self.top1.astype(int).tolist(),
            },
            "prompt_lengths": self.prompt_lengths,
        }

    def raise_if_failed(self) -> None:
        """Raise `ParityError` with every figure that is out of tolerance."""
        if self.failures:
            raise ParityError(
                f"{self.bundle} is out of tolerance in {self.runtime}: {'; '.join(self.failures)}."
            )


def verify(
    bundle: str | Path | Bundle,
    *,
    runtime: str | None = None,
    source: str | Path | None = None,
    tokens: int | None = None,
    positions: int | None = None,
    layers: bool = False,
    threads: int | None = None,
    progress: Progress = silent,
) -> ParityReport:
    """Check files, tokenizer and outputs of a bundle. The report says whether it passed; nothing is raised for a miss.

    Without `source` the reference is the golden record in the bundle. With it, the PIT (or plain) checkpoint
    that was exported is run anew on `tokens` (1,024) tokens of English text, every logit compared. `positions` cuts
    the record after its first ones (None: all), which a gate is too wide for. `layers` compares
    hidden states also where the outputs pass. Where a runtime's process dies, the report says so and has no
    figures. Raises `InputError` for a damaged bundle.
    """
    from pit_deploy.runtimes import open_runtime

    bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    if source is None and tokens is not None:
        raise InputError(
            "--tokens belongs to --source, which names the checkpoint to compare with; give both."
        )
    if positions is not None and (source is not None or positions < 1):
        raise InputError(f"--positions {positions} cuts the golden record: give at least 1, and no --source.")
    text = [] if source is None else _evaluation_ids(bundle, EVALUATION_TOKENS if tokens is None else tokens)
    progress("check files", 0, 1)
    bundle.check_hashes()
    bundle.check_tokenizer()
    bundle.check_end_ids()
    checkpoint = None if source is None else open_source(bundle, source)
    progress("check files", 1, 1)
    manifest = bundle.manifest
    gate = gate_of(manifest)
    golden = _golden(bundle)
    golden.check_end_ids(bundle.manifest.end_ids, bundle.manifest.context_length, str(bundle.path))
    if positions is not None:
        golden = few_passes.first_positions(golden, positions)
    try:
        opened = open_runtime(bundle, runtime, threads=threads)
        if checkpoint is None:
            report = _against_golden(bundle, opened, golden, gate, progress)
        else:
            report = _against_source(bundle, opened, golden, gate, checkpoint, text, progress)
    except RuntimeDiedError as error:
        return _without_answers(bundle, golden, gate, error)
    report.total_bytes = bundle.total_bytes
    report.load_rss_bytes = getattr(opened, "load_rss_bytes", None)
    judge(report, opened, golden, layers=layers, progress=progress)
    return report


def judge(
    report: ParityReport,
    runtime: Runtime,
    golden: GoldenRecord,
    *,
    layers: bool = False,
    progress: Progress = silent,
) -> None:
    """Fill in what is out of tolerance; where something is, or with `layers`, compare hidden states too."""
    report.failures = _failures(report)
    if len(report.kl) < MIN_POSITIONS:
        report.notes.append(f"only {len(report.kl)} positions were compared; a gate wants {MIN_POSITIONS}")
    if (layers or report.failures) and isinstance(runtime, FullRuntime):
        try:
            report.layers = layer_errors(runtime, golden, progress)
        except RuntimeDiedError as error:  # what was compared before stands
            report.failures.append(str(error))
        layer = report.first_diverging_layer
        if report.failures and layer is not None:
            name = "the embedding" if layer == 0 else f"layer {layer - 1}"
            report.failures.append(
                f"the first hidden state out of tolerance is that of {name} (relative error "
                f"{report.layers[layer].median:.2g})"
            )


def layer_errors(runtime: FullRuntime, golden: GoldenRecord, progress: Progress = silent) -> list[LayerError]:
    """Relative error after each layer, per position, from the projections of the record."""
    found: list[np.ndarray] = []
    for number, (start, prompt) in enumerate(zip(golden.starts, golden.prompts, strict=True)):
        progress("layers", number, len(golden.prompts))
        states, _ = runtime.hidden_states(prompt.ids)
        span = slice(start, start + len(prompt.ids))
        difference = project(states, golden.projection).astype(np.float64) - golden.hidden_projection[:, span]
        # The projection keeps squared norms on average, so the recorded norm itself is the better divisor.
        found.append(np.linalg.norm(difference, axis=-1) / np.maximum(golden.hidden_norm[:, span], 1e-30))
    progress("layers", len(golden.prompts), len(golden.prompts))
    errors = np.concatenate(found, axis=1)
    return [LayerError(n, float(np.median(row)), float(row.max())) for n, row in enumerate(errors)]


def compare_with_record(golden: GoldenRecord, position: int, logits: np.ndarray) -> tuple[float, float, bool]:
    """KL, largest absolute error and top-1 agreement of one position's logits [V] with the record.

    KL is exact over the recorded 256 largest; the rest of the vocabulary enters as one event, so that the
    figure is a lower bound that misses only differences within that rest.
    """
    ids, reference = golden.top_ids[position], golden.top_logits[position].astype(np.float64)
    log_p = reference - float(golden.logsumexp[position])
    log_q = logits[ids].astype(np.float64) - logsumexp(logits)
    p, q = np.exp(log_p), np.exp(log_q)
    rest_p, rest_q = max(1 - p.sum(), 0.0), max(1 - q.sum(), 1e-300)
    kl = float((p * (log_p - log_q)).sum()) + (rest_p * np.log(rest_p / rest_q) if rest_p > 1e-12 else 0.0)
    recorded = np.concatenate([golden.top_logits[position], golden.sampled_logits[position]])
    error = float(np.abs(logits[np.concatenate([ids, golden.sampled_ids])] - recorded).max())
    best = int(np.argmax(logits))
    agrees = best == ids[0] or bool((ids == best).any() and reference[0] - reference[ids == best][0] <= TIE)
    return kl if np.isnan(kl) else max(kl, 0.0), error, agrees


def compare_in_full(reference: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """KL, largest absolute error and top-1 agreement per position of logits [tokens, V]."""
    kl = np.empty(len(reference))
    for row, (p, q) in enumerate(zip(reference, logits, strict=True)):
        log_p, log_q = p - logsumexp(p), q - logsumexp(q)
        kl[row] = (np.exp(log_p) * (log_p - log_q)).sum()
    error = np.abs(logits - reference).max(axis=1)
    chosen = np.take_along_axis(reference, logits.argmax(axis=1)[:, None], axis=1)[:, 0]
    return np.maximum(kl, 0.0), error, reference.max(axis=1) - chosen <= TIE


def _against_golden(
    bundle: Bundle, runtime: Runtime, golden: GoldenRecord, gate: Gate, progress: Progress
) -> ParityReport:
    _check_record(bundle, golden)
    precision = bundle.manifest.precision
    return compare_with_golden(
        runtime,
        golden,
        gate,
        bundle=str(bundle.path),
        precision=coarsest(precision.weights, precision.tables),
        end_ids=bundle.manifest.end_ids,
        progress=progress,
    )


def compare_with_golden(
    runtime: Runtime,
    golden: GoldenRecord,
    gate: Gate,
    *,
    bundle: str,
    precision: str,
    end_ids: tuple[int, ...],
    progress: Progress = silent,
) -> ParityReport:
    """Run a record's prompts step by step and in one pass, and its greedy continuation; `judge` says what it means.

    `bundle` and `precision` only name what is run, which may be a runtime without a bundle.
    """
    rows: list[few_passes.Row] = []
    lengths = []
    prefill = 0.0
    if few_passes.is_slow(runtime):
        kept = few_passes.GREEDY_TOKENS
        margins = golden.greedy_margins[:kept]
        golden = replace(golden, greedy_ids=golden.greedy_ids[:kept], greedy_margins=margins)
    for start, prompt in zip(golden.starts, golden.prompts, strict=True):

        def compare(offset: int, logits: np.ndarray, start: int = start) -> few_passes.Row:
            progress("compare", start + offset + 1, golden.positions)
            return compare_with_record(golden, start + offset, logits)

        about = (prompt.ids, compare, golden.tokenizer_length)
        if few_passes.wants_few_passes(runtime):
            found, difference = few_passes.rows_of_prompt(runtime, *about)
        else:
            found, difference = _rows_one_by_one(runtime, *about)
        rows += found
        lengths.append(len(found))
        prefill = max(prefill, difference)
        progress("compare", start + len(prompt.ids), golden.positions)
    report = _report(
        bundle, precision, end_ids, runtime, gate, "golden record", rows, lengths, prefill, golden
    )
    report.notes += few_passes.notes(runtime, len(rows), report.greedy_tokens)
    return report


def _rows_one_by_one(
    runtime: Runtime, ids: Sequence[int], compare: Callable[[int, np.ndarray], few_passes.Row], tokens: int
) -> tuple[list[few_passes.Row], float]:
    """The rows of all positions of a prompt, and how far one pass and steps differ at the last.

    The last position is judged as the worse of one pass and step by step.
    """
    runtime.reset()
    last = runtime.prefill(ids)
    runtime.reset()
    logits, rows = last, []
    for offset, id in enumerate(ids):
        logits = runtime.decode(id)
        rows.append(compare(offset, logits))
    rows[-1] = few_passes.worse(rows[-1], compare(len(ids) - 1, last))
    return rows, _difference(last, logits, tokens)


def _against_source(
    bundle: Bundle,
    runtime: Runtime,
    golden: GoldenRecord,
    gate: Gate,
    source: Checkpoint,
    ids: list[int],
    progress: Progress,
) -> ParityReport:
    if not hasattr(runtime, "all_logits"):
        raise InputError(
            f"the runtime {runtime.name} gives no logits of every position; verify it without --source."
        )
    reference = open_reference(source)
    size = min(_EVALUATION_PROMPT, bundle.manifest.context_length)
    prompts = [ids[i : i + size] for i in range(0, len(ids), size)]
    rows: list[tuple[float, float, bool]] = []
    prefill = 0.0
    valid = bundle.manifest.tokenizer_length
    for number, prompt in enumerate(prompts):
        progress("compare", number, len(prompts))
        expected = reference.all_logits(prompt)[:, :valid]
        found = runtime.all_logits(prompt)
        runtime.reset()
        prefill = max(prefill, _difference(runtime.prefill(prompt), found[-1], valid))
        rows += zip(*(a.tolist() for a in compare_in_full(expected, found[:, :valid])), strict=True)
    progress("compare", len(prompts), len(prompts))
    precision = coarsest(bundle.manifest.precision.weights, bundle.manifest.precision.tables)
    return _report(
        str(bundle.path),
        precision,
        bundle.manifest.end_ids,
        runtime,
        gate,
        f"source {source.label}",
        rows,
        [len(p) for p in prompts],
        prefill,
        golden,
    )


def open_source(bundle: Bundle, source: str | Path) -> Checkpoint:
    """The checkpoint at `source`; raises `InputError` where it is not what the bundle was made from."""
    checkpoint = open_checkpoint(source)
    for entry in bundle.manifest.source.files:
        file = checkpoint.path / entry.name
        if not file.is_file() or file.stat().st_size != entry.size or sha256(file) != entry.sha256:
            raise InputError(
                f"{source} is not the checkpoint that this bundle was exported from: {entry.name} differs."
            )
    return checkpoint


def open_reference(checkpoint: Checkpoint) -> FullRuntime:
    """The model of a checkpoint as training ran it (or transformers, or the fold it is)."""
    from pit_deploy.folding import load_folded
    from pit_deploy.runtimes.torch import open_folded, open_plain, open_training

    if checkpoint.kind == "pit":
        return open_training(checkpoint)
    if checkpoint.layout == "shared":  # made from a folded checkpoint, which transformers cannot open
        return open_folded(load_folded(checkpoint), tokenizer_length=checkpoint.tokenizer_length())
    return open_plain(checkpoint)


def _evaluation_ids(bundle: Bundle, tokens: int) -> list[int]:
    from pit_deploy.quantize.calibration import evaluation_text

    if tokens < 2:
        raise InputError(f"--tokens {tokens} is too few to compare; give at least 2.")
    ids = [i for i in bundle.tokenizer.encode(evaluation_text()).ids if i < bundle.manifest.vocab_size]
    if len(ids) < tokens:
        raise InputError(f"--tokens {tokens} is more than the evaluation text has ({len(ids)} tokens).")
    return ids[:tokens]


def _report(
    bundle: str,
    precision: str,
    end_ids: tuple[int, ...],
    runtime: Runtime,
    gate: Gate,
    reference: str,
    rows: list[tuple[float, float, bool]],
    lengths: list[int],
    prefill: float,
    golden: GoldenRecord,
) -> ParityReport:
    kl, error, top1 = (np.array(column) for column in zip(*rows, strict=True))
    return ParityReport(
        bundle=bundle,
        runtime=runtime.name,
        precision=precision,
        gate=gate,
        reference=reference,
        kl=kl,
        max_abs=error,
        top1=top1.astype(bool),
        prompt_lengths=lengths,
        prefill_max_abs=prefill,
        greedy_tokens=len(golden.greedy_ids),
        greedy_equal=_greedy_equal(runtime, golden, end_ids),
    )


def _greedy_equal(runtime: Any, golden: GoldenRecord, end_ids: tuple[int, ...]) -> int:
    found, _ = greedy_continuation(
        runtime, golden.prompts[golden.greedy_prompt].ids, len(golden.greedy_ids), end_ids
    )
    for number, (mine, theirs) in enumerate(zip(found, golden.greedy_ids, strict=False)):
        if mine != theirs:
            # After a tie the two continuations are different texts; what follows cannot be compared.
            return len(golden.greedy_ids) if golden.greedy_margins[number] <= TIE else number
    return min(len(found), len(golden.greedy_ids))


def _failures(report: ParityReport) -> list[str]:
    gate = report.gate
    failures = []
    if not np.isfinite(report.max_abs).all() or not np.isfinite(report.kl).all():
        failures.append("some logits are not finite")
    if gate.max_abs is not None and not report.worst_abs <= gate.max_abs:
        failures.append(f"max abs logit error {report.worst_abs:.3g} is above {gate.max_abs:g}")
    if gate.max_abs is not None and not report.prefill_max_abs <= gate.max_abs:
        failures.append(
            f"one pass and step by step differ by {report.prefill_max_abs:.3g}, above {gate.max_abs:g}"
        )
    if not report.mean_kl <= gate.mean_kl:
        failures.append(f"mean KL {report.mean_kl:.3g} is above {gate.mean_kl:g}")
    if not report.top1_rate >= gate.top1:
        failures.append(f"top-1 agreement {report.top1_rate:.2%} is below {gate.top1:.1%}")
    if gate.greedy and report.greedy_equal < report.greedy_tokens:
        failures.append(f"greedy decoding differs at token {report.greedy_equal} of {report.greedy_tokens}")
    return failures


def _without_answers(
    bundle: Bundle, golden: GoldenRecord, gate: Gate, error: RuntimeDiedError
) -> ParityReport:
    """The report of a runtime whose process died: what was checked before stands, and every figure is missing."""
    missing, precision = np.full(golden.positions, np.nan), bundle.manifest.precision
    return ParityReport(
        bundle=str(bundle.path),
        runtime=bundle.manifest.runtime,
        precision=coarsest(precision.weights, precision.tables),
        gate=gate,
        reference="golden record",
        kl=missing,
        max_abs=missing.copy(),
        top1=np.zeros(golden.positions, np.bool_),
        prompt_lengths=[len(prompt.ids) for prompt in golden.prompts],
        prefill_max_abs=float("nan"),
        greedy_tokens=len(golden.greedy_ids),
        greedy_equal=0,
        total_bytes=bundle.total_bytes,
        failures=[str(error)],
        notes=["files and tokenizer are what the manifest says; no output could be compared"],
        answered=False,
    )


def _golden(bundle: Bundle) -> GoldenRecord:
    if bundle.manifest.golden is None:
        raise InputError(f"{bundle.path} carries no golden record; export it again.")
    return GoldenRecord.load(bundle.path)


def _check_record(bundle: Bundle, golden: GoldenRecord) -> None:
    longest = max(len(p.ids) for p in golden.prompts)
    if longest > bundle.manifest.context_length or golden.vocab_size != bundle.manifest.vocab_size:
        raise InputError(
            f"{bundle.path}: the golden record (longest prompt {longest}, vocabulary {golden.vocab_size}) does not "
            f"belong to this artifact (context {bundle.manifest.context_length}, vocabulary "
            f"{bundle.manifest.vocab_size})."
        )


def _difference(a: np.ndarray, b: np.ndarray, tokens: int) -> float:
    return float(np.abs(a[:tokens] - b[:tokens]).max())


def _rounded(values: np.ndarray) -> list[float | None]:
    return [_number(float(f"{v:.4g}")) for v in values]


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if np.isfinite(value) else None
