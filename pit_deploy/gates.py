"""Tolerances: what a runtime's outputs may differ from training, by runtime and precision.

The figures are measured ones with room above them (docs/parity.md); a miss is exit status 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pit_deploy.manifest import Manifest

PRECISION_ORDER = ("fp32", "fp16", "int8", "int4")
TIE = 1e-3
"""Two logits closer than this count as tied: either may be the largest."""


@dataclass(frozen=True)
class Gate:
    """Limits; None where the figure does not decide. `layer` is the relative error of a layer's hidden state."""

    max_abs: float | None
    mean_kl: float
    top1: float
    greedy: bool
    """Whether the greedy continuation must be the reference's, ties aside."""
    layer: float


GATES: dict[str, Gate] = {
    "fp32": Gate(max_abs=1e-3, mean_kl=1e-6, top1=1.0, greedy=True, layer=1e-3),
    "fp16": Gate(max_abs=None, mean_kl=1e-4, top1=0.995, greedy=False, layer=1e-2),
    "int8": Gate(max_abs=None, mean_kl=5e-3, top1=0.95, greedy=False, layer=0.15),
    "int4": Gate(max_abs=None, mean_kl=5e-2, top1=0.90, greedy=False, layer=0.5),
}


# Core ML computes in float16 and not only stores it: every activation is rounded.
COREML = {
    **GATES,
    "fp16": Gate(max_abs=None, mean_kl=1e-3, top1=0.99, greedy=False, layer=5e-2),
    "int8": Gate(max_abs=None, mean_kl=7e-3, top1=0.945, greedy=False, layer=0.15),
}

# ExecuTorch rounds activations a whole token at a time, with one scale for all channels. int4 loses 0.099 on the
# sample, torchao's own recipe 0.509 (docs/executorch.md).
EXECUTORCH = {
    **GATES,
    "int8": Gate(max_abs=None, mean_kl=2.5e-2, top1=0.92, greedy=False, layer=0.3),
    "int4": Gate(max_abs=None, mean_kl=0.15, top1=0.75, greedy=False, layer=0.8),
}

GATES_BY_RUNTIME: dict[str, dict[str, Gate]] = {"onnx": GATES, "executorch": EXECUTORCH, "coreml": COREML}
"""By the manifest's `runtime`; another runtime brings limits of its own."""

ARM64_FROM_X86 = {
    "cortex-a76": {"fp32": 1e-9, "int8": 5e-5, "int4": 2e-4},
    "cortex-a76:no-kleidiai": {"fp32": 1e-9, "int8": 5e-5, "int4": 1e-6},
    "cortex-a72": {"fp32": 1e-9, "int8": 5e-4, "int4": 7e-4},
}
"""Mean KL of an ONNX bundle on an ARM64 processor from the same bundle on x86-64: about ten times what was measured
(docs/arm64.md). Kernels round activations in ways of their own; the gates above hold on every processor besides."""


NESTED_HEAD_ROOM, NESTED_HEAD_MOST = 2.0, 0.1
"""A nested head estimates the logits outside its shortlist. What that costs stands in the manifest, as measured on
calibration text, and comes on top of the limit of the precision so many times, but no more than the second figure:
texts differ (docs/nested.md)."""


def coarsest(*precisions: str) -> str:
    """The precision that decides the gate of a mixed setting."""
    return max(precisions, key=PRECISION_ORDER.index)


def gate_for(runtime: str, weights: str, tables: str, nested_kl: float | None = None) -> Gate:
    """The gate of an artifact; `runtime` is the manifest's, `nested_kl` that of its nested head."""
    gate = GATES_BY_RUNTIME[runtime][coarsest(weights, tables)]
    if not nested_kl:
        return gate
    return replace(gate, mean_kl=gate.mean_kl + min(NESTED_HEAD_ROOM * nested_kl, NESTED_HEAD_MOST))


def gate_of(manifest: Manifest) -> Gate:
    """The gate of a bundle."""
    precision, nested = manifest.precision, manifest.nested_head
    kl = None if nested is None else nested.kl
    return gate_for(manifest.runtime, precision.weights, precision.tables, kl)
